"""What a replay is given, checked and laid out as the rows that routers see."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from rollout.distinct import check_distinct
from rollout.replay_rows import Rows
from storage.batch import ReplayBatch
from storage.trace import RoutingSpec


def rows_of(spec: RoutingSpec, batch: ReplayBatch | np.ndarray) -> Rows:
    """The `[B, S]` positions of a batch, flattened, or ids `[rows, sites, K]`; copies of the caller's arrays.

    Raises:
        ValueError: for ids that do not fit `spec`, or twice in a row, naming sample and position; for a batch that was
            collated for another model.
    """
    if isinstance(batch, np.ndarray):
        ids = spec.check_routes(batch, name="replay")
        check_distinct(spec, ids, None)
        return Rows(torch.from_numpy(ids.copy()))
    _check_spec(spec, batch.spec)
    ids = spec.check_routes(batch.routed_experts.reshape(-1, *batch.routed_experts.shape[2:]), name="replay")
    check_distinct(spec, ids, batch.route_mask.reshape(-1), partial(_place, batch))
    masks = batch.route_mask, batch.route_mask & batch.input_mask, batch.attention_mask.astype(bool)
    return Rows(torch.from_numpy(ids.copy()), *(torch.from_numpy(mask.reshape(-1).copy()) for mask in masks))


def batches_of(given: Any) -> list[ReplayBatch]:
    """A list of micro-batches; TypeError for anything else."""
    if isinstance(given, Sequence) and given and all(isinstance(part, ReplayBatch) for part in given):
        return list(given)
    raise TypeError(
        f"replay takes a ReplayBatch, a list of them or ids [rows, sites, K], got {type(given).__name__}; "
        "ReplayBatch.collate(traces, spec=replay.spec) makes a batch of traces"
    )


def missing_share(batches: Sequence[ReplayBatch | np.ndarray]) -> float:
    """Share of the rollout's inputs that have no recorded row."""
    known = [batch for batch in batches if isinstance(batch, ReplayBatch)]
    due = sum(int(batch.input_mask.sum()) for batch in known)
    return sum(int((batch.input_mask & ~batch.route_mask).sum()) for batch in known) / due if due else 0.0


def _check_spec(own: RoutingSpec, given: RoutingSpec) -> None:
    """Module names may differ: a trainer wraps, and a rollout loads a multimodal model's text part alone."""
    if len(own.sites) != len(given.sites):
        raise ValueError(f"the batch was collated for {len(given.sites)} sites, this model has {len(own.sites)}")
    for ours, theirs in zip(own.sites, given.sites, strict=True):
        if ours[1:] != theirs[1:]:
            raise ValueError(f"the batch was collated for another model: it has {theirs}, this model {ours}")


def _place(batch: ReplayBatch, row: int) -> str:
    """The sample and position of a row."""
    line, column = divmod(row, batch.input_ids.shape[1])
    if batch.cu_seqlens is not None:
        line = int(np.searchsorted(batch.cu_seqlens, column, side="right")) - 1
    return f"row {row}, sample {batch.sample_ids[line]!r}, position {batch.position_ids.reshape(-1)[row]},"
