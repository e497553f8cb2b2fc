"""SkyRL: one left-padded batch, unsigned or narrow ids `[B, T, L, K]`, dummy routes where nothing was recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from storage.convert_routes import Routes, all_rows, collapse_layers, expand_layers, fitting_dtype, recorded_part
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


def from_skyrl(batch: Mapping[str, np.ndarray], spec: RoutingSpec, *, num_layers: int | None) -> list[Routes]:
    """The routes of each sequence, read from `rollout_expert_indices` and both masks; inverse of `to_skyrl`.

    Raises:
        ValueError: shapes or ids that do not fit, a sequence that is not padded at the left, or a recorded row at
            padding.
    """
    attention = np.asarray(batch["attention_mask"]).astype(bool)
    recorded = ~np.asarray(batch["router_padding_mask"]).astype(bool)
    ids = _sites(batch["rollout_expert_indices"], recorded, spec, num_layers)
    if not ids.shape[:2] == attention.shape == recorded.shape:
        raise ValueError(
            f"rollout_expert_indices is {ids.shape[:2]}, attention_mask {attention.shape} and router_padding_mask "
            f"{recorded.shape}; need the same [B, T]"
        )
    return [_sequence(row, *arrays, spec) for row, arrays in enumerate(zip(ids, recorded, attention, strict=True))]


def _sites(array: np.ndarray, recorded: np.ndarray, spec: RoutingSpec, num_layers: int | None) -> np.ndarray:
    """Dummy routes of unrecorded rows have ids in dense layers too: only recorded rows are checked there."""
    array = np.asarray(array)
    if array.shape[:2] == recorded.shape and array.ndim == 4:
        array = np.where(recorded[:, :, None, None], array, 0)
    return collapse_layers(array, spec, num_layers, name="skyrl rollout_expert_indices")


def _sequence(row: int, ids: np.ndarray, recorded: np.ndarray, attention: np.ndarray, spec: RoutingSpec) -> Routes:
    name = f"skyrl row {row}"
    tokens = int(attention.sum())
    start = len(attention) - tokens
    if not tokens or not attention[start:].all():
        raise ValueError(f"{name}: attention_mask must be ones at the right end only, got {tokens} tokens elsewhere")
    if recorded[:start].any():
        raise ValueError(f"{name}: router_padding_mask says that padding column {int(recorded.argmax())} was recorded")
    last = tokens - 1 if not recorded[-1] else tokens
    return recorded_part(ids[start : start + last], recorded[start : start + last], spec, name=name)
