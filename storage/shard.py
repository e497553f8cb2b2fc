"""Parts of a ReplayBatch for one rank: rows, columns or sites, as views where numpy has them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.trace import RoutingSpec

if TYPE_CHECKING:
    from storage.batch import ReplayBatch

CP_LAYOUTS = ("zigzag", "contiguous")
PER_TOKEN = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "completion_mask",
    "loss_mask",
    "logprobs",
    "raw_logprobs",
    "advantages",
    "routed_experts",
    "route_mask",
    "input_mask",
)
PER_SEQUENCE = ("rewards", "truncated", "sample_ids", "weight_versions")


def bounds(count: int, rank: int, size: int, what: str) -> tuple[int, int]:
    """First and last + 1 of `count` sequences that part `rank` of `size` has; the first parts have one more.

    >>> [bounds(5, rank, 2, "dp") for rank in range(2)]
    [(0, 3), (3, 5)]
    """
    check_rank(rank, size, what)
    if count < size:
        raise ValueError(
            f"{count} sequences cannot be split into {size} parts ({what}); collate at least {size} traces"
        )
    share, more = divmod(count, size)
    start = rank * share + min(rank, more)
    return start, start + share + (rank < more)


def check_rank(rank: int, size: int, what: str) -> None:
    """ValueError unless 0 <= rank < size."""
    if not 0 <= rank < size:
        raise ValueError(f"{what}: rank {rank} of {size} does not exist, need 0 <= rank < size")


def sequences(batch: ReplayBatch, start: int, end: int) -> ReplayBatch:
    """Sequences `[start, end)`: rows, or in a packed batch columns. All views but cu_seqlens."""
    parts: dict[str, Any] = {name: getattr(batch, name)[start:end] for name in PER_SEQUENCE}
    if batch.cu_seqlens is None:
        return replace(batch, **parts, **_tokens(batch, (slice(start, end),)))
    ends = batch.cu_seqlens[start : end + 1]
    columns = slice(int(ends[0]), int(ends[-1]))
    return replace(batch, **parts, **_tokens(batch, (slice(None), columns)), cu_seqlens=ends - ends[0])


def sites(batch: ReplayBatch, wanted: slice) -> ReplayBatch:
    """The sites of a pipeline stage, as a view with the K of these sites."""
    spec = batch.spec.sites[wanted]
    if not spec:
        raise ValueError(f"{wanted} selects none of the {batch.spec.num_sites} sites")
    part = RoutingSpec(spec)
    return replace(batch, spec=part, routed_experts=batch.routed_experts[:, :, wanted, : part.top_k])


def context_parallel(batch: ReplayBatch, rank: int, size: int, layout: str) -> ReplayBatch:
    """The columns of one context-parallel rank, in a packed batch of each sequence; see `ReplayBatch.cp`."""
    check_rank(rank, size, "cp")
    if layout not in CP_LAYOUTS:
        raise ValueError(f"cp layout {layout!r} is not supported; supported: {', '.join(CP_LAYOUTS)}")
    if batch.cp_size != 1:
        raise ValueError(f"the batch is already a shard of cp_size {batch.cp_size}; shard the whole batch")
    spans = _merged(_spans(batch, rank, size, layout))
    parts = [_tokens(batch, (slice(None), slice(*span))) for span in spans]
    joined = parts[0] if len(parts) == 1 else {name: _concatenate([p[name] for p in parts]) for name in parts[0]}
    ends = None if batch.cu_seqlens is None else batch.cu_seqlens // np.int32(size)
    return replace(batch, **joined, cu_seqlens=ends, prompt_width=None, cp_size=size)


def _spans(batch: ReplayBatch, rank: int, size: int, layout: str) -> list[tuple[int, int]]:
    """Column ranges of a rank, in order: per sequence one chunk of `size`, or chunks `rank` and `-rank` of 2 `size`."""
    chunks = [rank] if layout == "contiguous" else [rank, 2 * size - 1 - rank]
    pieces = size * len(chunks)
    ends = [0, batch.input_ids.shape[1]] if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    spans = []
    for index, (start, end) in enumerate(pairwise(ends)):
        if (end - start) % pieces:
            name = "the batch" if batch.cu_seqlens is None else f"trace {batch.sample_ids[index]!r}"
            raise ValueError(
                f"{name} has {end - start} columns, {layout} over {size} ranks needs a multiple of {pieces}: "
                f"collate with pad_to_multiple_of={pieces}"
            )
        width = (end - start) // pieces
        spans += [(start + chunk * width, start + (chunk + 1) * width) for chunk in chunks]
    return spans


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbouring ranges become one, which is a view."""
    merged = spans[:1]
    for start, end in spans[1:]:
        if start == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _tokens(batch: ReplayBatch, index: tuple[slice, ...]) -> dict[str, Any]:
    arrays = {name: getattr(batch, name) for name in PER_TOKEN}
    return {name: None if array is None else array[index] for name, array in arrays.items()}


def _concatenate(parts: list[Any]) -> np.ndarray | None:
    return None if parts[0] is None else np.concatenate(parts, axis=1)
