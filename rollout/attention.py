"""Attention of one flattened batch over the slot pool, registered with transformers' attention interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rollout.attention_plan import AttentionBatch, Group, NativeReads, Span
from rollout.native import fit_attention
from rollout.reach import Reach, causal_mask

ATTENTION_NAME = "moe_rollout_slots"
# Keywords that models pass and that change nothing in causal attention with the mask we build ourselves.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "output_router_logits"}
)


class LatentCacheError(ValueError):
    """The model caches something smaller than keys and values and expands it after reading the cache."""


class NativeAttentionError(ValueError):
    """Our own kernels do not compute this attention: sinks, soft caps, head sizes that fill no vector, float16."""


@dataclass(frozen=True)
class Rule:
    """How one layer attends.

    Attributes:
        scale: of the scores; None is 1 / sqrt(head_dim).
        reach: how far back a query sees.
        sinks: `[heads]` or None, a logit per head that takes part in the softmax and has no value (gpt-oss).
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
    """

    scale: float | None
    reach: Reach
    sinks: torch.Tensor | None
    softcap: float | None

    @property
    def is_plain(self) -> bool:
        """torch's fused kernel computes it."""
        return self.sinks is None and self.softcap is None


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_batch: AttentionBatch,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of `[1, heads, tokens, dim]` queries, each request over its own slots.

    Returns `[1, tokens, heads, dim]`; rows that belong to no span (padding) are zero.

    Raises:
        ValueError: for a keyword that would change the result and is not honoured, by name.
        LatentCacheError: the pool must be switched to latent mode for this model.
        NativeAttentionError: the batch was planned for kernels that do not compute it.
    """
    unknown = sorted(name for name, given in keywords.items() if given is not None and name not in HARMLESS)
    if unknown or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} passes {unknown or ['attention_mask']} to attention, "
            "which this engine does not honour yet"
        )
    rule = Rule(scaling, _reach(module, sliding_window), s_aux, softcap)
    keys, values = _stores(module, key, value, attention_batch)
    if attention_batch.table is not None:
        return _by_table(query, keys, values, rule, attention_batch)[None], None
    out = query.new_empty(query.shape[2], query.shape[1], values.shape[-1])
    out[len(attention_batch.out_cache_loc) :] = 0
    if attention_batch.native is not None:
        _natively(query[0].transpose(0, 1), keys, values, rule, attention_batch.native, out)
    for group in attention_batch.groups:
        q = query[0, :, group.start : group.end].unflatten(1, (-1, group.tokens)).transpose(0, 1)
        k, v = _strided(keys, group), _strided(values, group)
        if attention_batch.batch_invariant:
            found = _attend_by_token(q, k, v, rule, group.longest - group.tokens)
        else:
            found = _scored(q, k, v, rule, attention_batch.mask(group, rule.reach, query.dtype))
        out[group.start : group.end] = found.transpose(1, 2).flatten(0, 1)
    for span in attention_batch.spans:
        rows = slice(span.slot, span.slot + span.kv_len)
        q = query[:, :, span.start : span.end]
        k, v = keys[rows].transpose(0, 1)[None], values[rows].transpose(0, 1)[None]
        if attention_batch.batch_invariant:
            found = _attend_by_token(q, k, v, rule, span.position)
        else:
            found = _attend(q, k, v, rule, span, attention_batch)
        out[span.start : span.end] = found[0].transpose(0, 1)
    return out[None], None


def _reach(module: Any, window: int | None) -> Reach:
    """From the window that the layer passes, or that its config has for the kind of layer."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else None
    if kind == "chunked_attention":
        return Reach(chunk=module.config.attention_chunk_size)
    if window is None and kind == "sliding_attention":
        window = getattr(config, "sliding_window", None)  # qwen2_moe builds it into the mask alone
    if window is None and (kind == "sliding_attention" or (kind is None and _masked_by_window(config))):
        raise ValueError(f"{type(module).__name__} passes no window to attention, which its config has")
    return Reach(window=window)


def _masked_by_window(config: Any) -> bool:
    """A window shorter than the longest sequence. phimoe has it in its mask and nothing else tells; refused, since a
    window too long for the self-test would be believed unseen."""
    window, positions = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    return bool(window) and (positions is None or window < positions)


def _stores(
    module: Any, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as `[slots, heads, dim]`: the pool's, or what the model made of the gathered latents."""
    if batch.gathered is not None:
        return key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys, values = batch.pool.keys[module.layer_idx], batch.pool.values[module.layer_idx]
    for given, stored in ((key, keys), (value, values)):
        if (given.shape[1], given.shape[3]) != stored.shape[1:]:
            raise LatentCacheError(f"{type(module).__name__} expands what it caches")
    return keys, values


def _natively(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: Rule,
    reads: NativeReads,
    out: torch.Tensor,
) -> None:
    """The first tokens of a `[tokens, heads, dim]` query, into the same of `out`."""
    if not rule.is_plain or not fit_attention(keys, values) or out.dtype is not values.dtype:
        raise NativeAttentionError(f"attention over {keys.dtype} keys {list(keys.shape)}, {rule}")
    count = len(reads.first)
    reads.kernels.attention(query[:count], keys, values, *reads.seen(rule.reach), rule.scale, out[:count])


def _by_table(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: Rule, batch: AttentionBatch
) -> torch.Tensor:
    """`[tokens, heads, dim]`. Query heads that share a key head are its queries: no head is repeated in memory."""
    slots = batch.table_slots
    assert slots is not None

    def gathered(store: torch.Tensor) -> torch.Tensor:
        rows = store.unflatten(0, slots.shape) if batch.gathered is not None else store[slots]
        return rows.transpose(1, 2)

    q = query[0].transpose(0, 1)
    q = q.unflatten(1, (keys.shape[1], -1)) if rule.is_plain else q[:, :, None]
    mask = batch.table_mask(rule.reach, query.dtype)
    return _scored(q, gathered(keys), gathered(values), rule, mask).flatten(1, 2)


def _strided(store: torch.Tensor, group: Group) -> torch.Tensor:
    """`[requests, heads, keys, dim]` of a `[slots, heads, dim]` store, without a copy."""
    heads, dim = store.shape[1:]
    row = heads * dim
    size = (len(group.kv_lens), heads, group.longest, dim)
    return store.as_strided(size, (group.stride * row, dim, row, 1), group.slot * row)


def _scored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: Rule,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """`[B, heads, queries, dim]`. `mask` is additive and broadcasts to `[B, heads, queries, keys]`."""
    if rule.is_plain:
        if (
            q.dtype is not torch.float32 and not causal and q.shape[2] == 1 and q.shape[1] != k.shape[1]
        ):  # 4 to 11 times as fast
            return _scored(q.reshape(len(q), k.shape[1], -1, q.shape[-1]), k, v, rule, mask).flatten(1, 2)[:, :, None]
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=rule.scale, enable_gqa=gqa
        )
    if causal:
        mask = causal_mask(q.shape[2], k.shape[2], 0, Reach(), q)
    return _eager(q, k, v, rule, mask)


def _eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, mask: torch.Tensor | None) -> torch.Tensor:
    """Scores in the open: soft cap, mask, sinks, softmax in float32."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = q @ k.transpose(-1, -2) * (rule.scale if rule.scale is not None else q.shape[-1] ** -0.5)
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores + mask
    if rule.sinks is not None:
        sinks = rule.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    return scores.float().softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, span: Span, batch: AttentionBatch
) -> torch.Tensor:
    """Attention of one request's newest tokens over its keys, which start at position 0."""
    length, last = q.shape[2], span.kv_len - 1
    if length == 1:
        first = rule.reach.first(last)
        return _scored(q, k[:, :, first:], v[:, :, first:], rule)
    if span.position == 0 and rule.reach.first(last) == 0:
        return _scored(q, k, v, rule, causal=True)
    return _scored(q, k, v, rule, mask=batch.causal_mask(span, rule.reach, q))


def _attend_by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule, position: int) -> torch.Tensor:
    """The same, one query of each request at a time over exactly its own keys: no bit depends on how a prompt was cut
    into chunks, nor on how many requests there are."""

    def one(i: int) -> torch.Tensor:
        at = position + i
        seen = slice(rule.reach.first(at), at + 1)
        return _scored(q[:, :, i : i + 1], k[:, :, seen], v[:, :, seen], rule)

    with _one_thread():
        return one(0) if q.shape[2] == 1 else torch.cat([one(i) for i in range(q.shape[2])], dim=2)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The CPU kernel gives each thread its own scratch memory, and the heads of the second thread other last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def use_slot_attention(model: Any) -> None:
    """Switch `model` to `slot_attention`. No mask function is registered, so transformers builds none."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    model.set_attn_implementation(ATTENTION_NAME)
