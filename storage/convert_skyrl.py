"""SkyRL: one left-padded batch, unsigned or narrow ids `[B, T, L, K]`, dummy routes where nothing was recorded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.convert_routes import all_rows, expand_layers, fitting_dtype
from storage.trace import RoutingSpec, Trace


def to_skyrl(
    traces: Sequence[Trace], spec: RoutingSpec, *, num_layers: int | None, pad_token_id: int = 0
) -> dict[str, np.ndarray]:
    """Arrays under SkyRL's names, padded at the left to T tokens.

    sequences and attention_mask int64 `[B, T]`, rollout_expert_indices `[B, T, L, K]` of the narrowest of uint8, int16
    and int32 that holds the model's ids (not the data's: SkyRL#2078), and router_padding_mask bool `[B, T]`, True
    at padding and at tokens without a recorded row, whose route is 0 to K - 1. vLLM, which SkyRL reads, counts all
    decoder layers: give `num_layers`, or None for a MoE-only axis.

    Raises:
        ValueError: no traces, no routes, or a layer beyond num_layers.
    """
    if not traces:
        raise ValueError("cannot export an empty list of traces")
    dtype = fitting_dtype(spec, ["uint8", "int16", "int32"], target="skyrl")
    shape = len(traces), max(len(trace.token_ids) for trace in traces)
    sequences = np.full(shape, pad_token_id, np.int64)
    attention = np.zeros(shape, np.int64)
    indices = np.empty((*shape, num_layers or spec.num_sites, spec.top_k), dtype)
    indices[...] = np.arange(spec.top_k, dtype=dtype)
    padding = np.ones(shape, bool)
    for row, trace in enumerate(traces):
        tokens = slice(shape[1] - len(trace.token_ids), None)
        ids, recorded = all_rows(trace, spec)
        sequences[row, tokens] = trace.token_ids
        attention[row, tokens] = 1
        indices[row, tokens][recorded] = expand_layers(ids[recorded].astype(dtype), spec, num_layers)
        padding[row, tokens] = ~recorded
    return {
        "sequences": sequences,
        "attention_mask": attention,
        "rollout_expert_indices": indices,
        "router_padding_mask": padding,
    }
