"""The arrays of a ReplayBatch from traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from storage.layouts import PAD_ROUTES, PADDINGS, Layout, layout, strided_routes
from storage.trace import RoutingSpec, Trace
from storage.turns import MergedTrace, clip_spans


def collate(
    traces: Sequence[Trace | MergedTrace],
    *,
    spec: RoutingSpec,
    padding: str,
    pad_token_id: int,
    pad_routes: str,
    pad_to_multiple_of: int,
    max_length: int | None,
    advantages: Sequence[Any] | None,
    loss_masks: Sequence[Any] | None,
) -> dict[str, Any]:
    """The fields of a ReplayBatch; arguments and errors as in `ReplayBatch.collate`."""
    _check_option("padding", padding, PADDINGS)
    _check_option("pad_routes", pad_routes, PAD_ROUTES)
    if not traces:
        raise ValueError("cannot collate an empty list of traces")
    merged = [trace if isinstance(trace, MergedTrace) else MergedTrace.of(trace) for trace in traces]
    for trace in merged:
        spec.check_routes(trace.routed_experts, name=f"trace {trace.sample_id!r}")
    kept = [_kept(trace, max_length) for trace in merged]
    place = layout(padding, kept, [trace.prompt_len for trace in merged], pad_to_multiple_of)
    weights = _per_token("loss_masks", loss_masks, merged)
    gains = _per_token("advantages", advantages, merged)
    fields = _empty(merged, kept, place, spec, pad_token_id, advantages is not None)
    for index, trace in enumerate(merged):
        at = _Target(fields, place.rows[index], place.starts[index], kept[index])
        at.fill(trace, weights[index], gains[index])
    _finish_padding(fields, place, strided=pad_routes == "strided")
    return fields


def _check_option(name: str, value: str, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise ValueError(f"{name} {value!r} is not supported; supported: {', '.join(supported)}")


def _kept(trace: MergedTrace, max_length: int | None) -> int:
    """Tokens that stay; a prompt is never cut."""
    length = len(trace.token_ids)
    if max_length is None or length <= max_length:
        return length
    if trace.prompt_len > max_length:
        raise ValueError(
            f"trace {trace.sample_id!r}: its prompt ends at position {trace.prompt_len}, behind max_length "
            f"{max_length}, and only completions are cut; leave it out, or raise max_length"
        )
    return max_length


def _per_token(name: str, values: Sequence[Any] | None, traces: list[MergedTrace]) -> list[np.ndarray | None]:
    """Per trace float32 `[T]`, 0 at tokens that were not sampled, or None when none were given."""
    if values is None:
        return [None] * len(traces)
    if len(values) != len(traces):
        raise ValueError(f"{name} has {len(values)} entries for {len(traces)} traces, need one per trace")
    return [_of_trace(name, value, trace) for value, trace in zip(values, traces, strict=True)]


def _of_trace(name: str, value: Any, trace: MergedTrace) -> np.ndarray:
    given = np.asarray(value, np.float32)
    count = len(trace.token_ids) - trace.prompt_len
    who = f"{name} of trace {trace.sample_id!r}"
    if given.shape != (count,) and (given.shape or name == "loss_masks"):
        raise ValueError(
            f"{who} has shape {given.shape}, need ({count},): one per token from position {trace.prompt_len} on"
        )
    full = np.concatenate([np.zeros(trace.prompt_len, np.float32), np.broadcast_to(given, count)])
    if not np.isfinite(full).all():
        raise ValueError(f"{who} is {full[~np.isfinite(full)][0]} at position {int((~np.isfinite(full)).argmax())}")
    outside = (full != 0) & ~trace.sampled
    if given.shape and outside.any():
        at = int(outside.argmax())
        raise ValueError(f"{who} is {full[at]} at position {at}, which was not sampled; it must be 0 there")
    return np.where(trace.sampled, full, np.float32(0))


def _empty(
    traces: list[MergedTrace], kept: list[int], place: Layout, spec: RoutingSpec, pad_token_id: int, gains: bool
) -> dict[str, Any]:
    shape = place.shape
    raw = all(trace.raw_logprobs is not None for trace in traces)
    return {
        "spec": spec,
        "input_ids": np.full(shape, pad_token_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "position_ids": np.zeros(shape, np.int64),
        "completion_mask": np.zeros(shape, bool),
        "loss_mask": np.zeros(shape, np.float32),
        "logprobs": np.zeros(shape, np.float32),
        "raw_logprobs": np.zeros(shape, np.float32) if raw else None,
        "advantages": np.zeros(shape, np.float32) if gains else None,
        "routed_experts": np.zeros((*shape, *spec.row_shape), spec.dtype),
        "route_mask": np.zeros(shape, bool),
        "input_mask": np.zeros(shape, bool),
        "rewards": np.array([np.nan if trace.reward is None else trace.reward for trace in traces], np.float32),
        "truncated": np.array([length < len(trace.token_ids) for length, trace in zip(kept, traces, strict=True)]),
        "sample_ids": [trace.sample_id for trace in traces],
        "weight_versions": [
            clip_spans(trace.weight_versions, 0, min(length, trace.num_rows))
            for length, trace in zip(kept, traces, strict=True)
        ],
        "prompt_width": place.prompt_width,
        "cu_seqlens": place.cu_seqlens,
    }


class _Target:
    """The columns of one sequence in the arrays of a batch."""

    def __init__(self, fields: dict[str, Any], row: int, start: int, length: int) -> None:
        self._fields, self._row, self._start, self._length = fields, row, start, length

    def fill(self, trace: MergedTrace, weights: np.ndarray | None, gains: np.ndarray | None) -> None:
        """Write the first tokens and rows of `trace`."""
        self._write("input_ids", trace.token_ids)
        self._write("attention_mask", np.ones_like(trace.token_ids))
        self._write("position_ids", np.arange(len(trace.token_ids)))
        self._write("completion_mask", trace.sampled)
        self._write("loss_mask", trace.sampled if weights is None else weights)
        self._write("logprobs", trace.logprobs)
        self._write("raw_logprobs", trace.raw_logprobs)
        self._write("advantages", gains)
        self._write("input_mask", np.arange(len(trace.token_ids)) < trace.num_rows)
        rows = len(trace.routed_experts)
        self._write("routed_experts", trace.routed_experts, trace.route_start)
        valid = np.ones(rows, bool) if trace.route_valid is None else trace.route_valid
        self._write("route_mask", valid, trace.route_start)

    def _write(self, name: str, values: np.ndarray | None, first: int = 0) -> None:
        if values is None or self._fields[name] is None:
            return
        kept = values[: max(self._length - first, 0)]
        start = self._start + first
        self._fields[name][self._row, start : start + len(kept)] = kept


def _finish_padding(fields: dict[str, Any], place: Layout, strided: bool) -> None:
    padding = fields["attention_mask"] == 0
    if place.cu_seqlens is not None:
        lengths = np.diff(place.cu_seqlens)
        fields["position_ids"][0] = np.arange(place.shape[1]) - np.repeat(place.cu_seqlens[:-1], lengths)
    if strided:
        fields["routed_experts"][padding] = strided_routes(fields["spec"], int(padding.sum()))
        fields["route_mask"] |= padding
