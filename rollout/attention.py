"""Attention of one flattened batch over the slot pool, registered with transformers' attention interface."""

from __future__ import annotations

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


class Span(NamedTuple):
    """Tokens `[start, end)` of the flattened batch belong to one request; its keys are `[slot, slot + kv_len)`."""

    start: int
    end: int
    slot: int
    kv_len: int


@dataclass(frozen=True)
class AttentionBatch:
    """Where each token of a step reads and writes. Host integers only, but for `out_cache_loc`: the slot per token."""

    pool: KVPool
    spans: list[Span]
    out_cache_loc: torch.Tensor
    batch_invariant: bool = False


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
            f"{type(module).__name__} passes {unknown or ['attention_mask']} to attention, which this engine does not honour yet"
        )
    layer = module.layer_idx
    keys, values = attention_batch.pool.keys[layer], attention_batch.pool.values[layer]
    out = query.new_zeros(query.shape[2], query.shape[1], values.shape[-1])
    attend = _attend_by_token if attention_batch.batch_invariant else _attend
    for span in attention_batch.spans:
        k = keys[span.slot : span.slot + span.kv_len].transpose(0, 1)[None]
        v = values[span.slot : span.slot + span.kv_len].transpose(0, 1)[None]
        out[span.start : span.end] = attend(query[:, :, span.start : span.end], k, v, scaling)[0].transpose(
            0, 1
        )
    return out[None], None


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Scaled dot product attention; the last query sees all keys, the one before it one less, and so on."""
    length, past = q.shape[2], k.shape[2] - q.shape[2]
    mask = None
    if past and length > 1:
        mask = torch.ones(length, past + length, dtype=torch.bool, device=q.device).tril(past)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=not past and length > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attend_by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """The same, one query at a time over exactly its own keys: no bit depends on how a prompt was cut into chunks."""
    past = k.shape[2] - q.shape[2]
    rows = [
        _attend(q[:, :, i : i + 1], k[:, :, : past + i + 1], v[:, :, : past + i + 1], scale)
        for i in range(q.shape[2])
    ]
    return torch.cat(rows, dim=2)


def use_slot_attention(model: Any) -> None:
    """Switch `model` to `slot_attention`. No mask function is registered, so transformers builds none."""
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    model.set_attn_implementation(ATTENTION_NAME)
