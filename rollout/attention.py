"""Attention of one flattened batch over the slot pool, registered with transformers' attention interface."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from rollout.kv_pool import KVPool

ATTENTION_NAME = "moe_rollout_slots"
# Keywords that models pass and that change nothing in causal attention with the mask we build ourselves.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "output_router_logits"}
)
# Decodes share one kernel call while at most this share of the keys it reads is masked.
MAX_MASKED = 0.4


class Span(NamedTuple):
    """Tokens `[start, end)` of the flattened batch belong to one request.

    It owns the slots `[slot, slot + capacity)`; its keys are in the first `kv_len` of them.
    """

    start: int
    end: int
    slot: int
    kv_len: int
    capacity: int


class DecodeGroup(NamedTuple):
    """Tokens `[start, end)`, one per request, whose keys start at `slot`, `slot + stride`, ...: one strided view.

    `mask` is additive, `[requests, 1, 1, kv_len]`.
    """

    start: int
    end: int
    slot: int
    stride: int
    kv_len: int
    mask: torch.Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Where each token of a step reads and writes: host integers, but for masks and `out_cache_loc`, the slots."""

    pool: KVPool
    spans: list[Span]
    groups: list[DecodeGroup]
    out_cache_loc: torch.Tensor
    batch_invariant: bool

    @classmethod
    def plan(
        cls, pool: KVPool, spans: list[Span], out_cache_loc: torch.Tensor, dtype: torch.dtype, batch_invariant: bool
    ) -> AttentionBatch:
        """Gather decodes whose slots are evenly spaced; in batch-invariant mode every request is on its own."""
        singles, groups = list(spans), []
        if not batch_invariant:
            runs = _even_runs([span for span in spans if span.end - span.start == 1])
            groups = [_group(run, dtype) for run in runs]
            grouped = {span.start for run in runs for span in run}
            singles = [span for span in spans if span.start not in grouped]
        return cls(pool, singles, groups, out_cache_loc, batch_invariant)


def _even_runs(spans: Sequence[Span]) -> list[list[Span]]:
    """Runs of two or more neighbours in the batch whose slots have one distance and whose lengths are alike.

    A run reads, and masks, slots behind a request's keys, but never another request's: these may hold NaN, and
    0 * NaN is NaN.
    """
    runs: list[list[Span]] = []
    for span in spans:
        if runs and _continues(runs[-1], span):
            runs[-1].append(span)
        else:
            runs.append([span])
    return [run for run in runs if len(run) > 1]


def _continues(run: list[Span], span: Span) -> bool:
    last = run[-1]
    even = len(run) == 1 or span.slot - last.slot == last.slot - run[-2].slot
    longest = max(span.kv_len, *(s.kv_len for s in run))
    read = (len(run) + 1) * longest
    wasted = read - span.kv_len - sum(s.kv_len for s in run)
    return (
        even
        and span.slot > last.slot
        and span.start == last.end
        and longest <= min(span.capacity, *(s.capacity for s in run))
        and wasted <= MAX_MASKED * read
    )


def _group(run: list[Span], dtype: torch.dtype) -> DecodeGroup:
    lengths = torch.tensor([span.kv_len for span in run])
    longest = max(span.kv_len for span in run)
    mask = torch.zeros(len(run), 1, 1, longest, dtype=dtype)
    mask.masked_fill_(torch.arange(longest) >= lengths[:, None, None, None], -torch.inf)
    return DecodeGroup(run[0].start, run[-1].end, run[0].slot, run[1].slot - run[0].slot, longest, mask)


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
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of `[1, heads, tokens, dim]` queries, each request over its own slots.

    Returns `[1, tokens, heads, dim]`; rows that belong to no span (padding) are zero.

    Raises:
        ValueError: for a keyword that would change the result and is not honoured, by name.
    """
    unknown = sorted(name for name, given in keywords.items() if given is not None and name not in HARMLESS)
    if unknown or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} passes {unknown or ['attention_mask']} to attention, "
            "which this engine does not honour yet"
        )
    layer = module.layer_idx
    keys, values = attention_batch.pool.keys[layer], attention_batch.pool.values[layer]
    out = query.new_zeros(query.shape[2], query.shape[1], values.shape[-1])
    for group in attention_batch.groups:
        q = query[0, :, group.start : group.end].transpose(0, 1)[:, :, None]
        k, v = _strided(keys, group), _strided(values, group)
        out[group.start : group.end] = _sdpa(q, k, v, scaling, mask=group.mask)[:, :, 0]
    attend = _attend_by_token if attention_batch.batch_invariant else _attend
    for span in attention_batch.spans:
        rows = slice(span.slot, span.slot + span.kv_len)
        k, v = keys[rows].transpose(0, 1)[None], values[rows].transpose(0, 1)[None]
        out[span.start : span.end] = attend(query[:, :, span.start : span.end], k, v, scaling)[0].transpose(0, 1)
    return out[None], None


def _strided(store: torch.Tensor, group: DecodeGroup) -> torch.Tensor:
    """`[requests, heads, kv_len, dim]` of a `[slots, heads, dim]` store, without a copy."""
    heads, dim = store.shape[1:]
    row = heads * dim
    size = (group.end - group.start, heads, group.kv_len, dim)
    return store.as_strided(size, (group.stride * row, dim, row, 1), group.slot * row)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Scaled dot product attention; the last query sees all keys, the one before it one less, and so on."""
    length, past = q.shape[2], k.shape[2] - q.shape[2]
    if length == 1 or not past:
        return _sdpa(q, k, v, scale, causal=length > 1)
    mask = torch.ones(length, past + length, dtype=torch.bool, device=q.device).tril(past)
    return _sdpa(q, k, v, scale, mask=mask)


def _attend_by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """The same, one query at a time over exactly its own keys: no bit depends on how a prompt was cut into chunks."""
    past = k.shape[2] - q.shape[2]
    with _one_thread():
        rows = [
            _sdpa(q[:, :, i : i + 1], k[:, :, : past + i + 1], v[:, :, : past + i + 1], scale)
            for i in range(q.shape[2])
        ]
    return torch.cat(rows, dim=2)


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
