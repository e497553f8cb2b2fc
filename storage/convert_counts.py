"""Expert load for expert-placement balancers: how many recorded rows chose each expert, per window."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np

from storage.convert_routes import all_rows, expand_layers
from storage.trace import RoutingSpec, Trace


def expert_counts(
    traces: Iterable[Trace], spec: RoutingSpec, *, num_layers: int | None = None, window_rows: int | None = None
) -> np.ndarray:
    """int64 `[windows, L, experts]`; experts is the largest count of any router, unused ones are 0.

    Args:
        traces: read once, in order; missing rows are not counted.
        spec: their routers.
        num_layers: of the decoder, with zeros at dense layers; None for MoE layers only.
        window_rows: recorded rows per window, the last one with what is left; None for one window of everything.

    >>> expert_counts(traces, spec)[0].sum(axis=1)  # 38 rows, top 2, 3 routers
    array([76, 76, 76])

    Raises:
        ValueError: window_rows below 1, a trace without routes, or a layer beyond num_layers.
    """
    if window_rows is not None and window_rows < 1:
        raise ValueError(f"window_rows={window_rows}, need at least 1")
    empty = np.zeros((spec.num_sites, max(site.num_experts for site in spec.sites)), np.int64)
    windows = [] if window_rows else [empty.copy()]
    room = 0 if window_rows else sys.maxsize
    for trace in traces:
        ids, recorded = all_rows(trace, spec)
        rows = ids[recorded]
        while len(rows):
            if not room:
                windows.append(empty.copy())
                room = window_rows or 0
            part, rows = rows[:room], rows[room:]
            windows[-1] += _count(part, spec, empty.shape[1])
            room -= len(part)
    return expand_layers(np.stack(windows) if windows else empty[None][:0], spec, num_layers)


def _count(rows: np.ndarray, spec: RoutingSpec, experts: int) -> np.ndarray:
    used = (rows[:, index, : site.top_k].reshape(-1) for index, site in enumerate(spec.sites))
    return np.stack([np.bincount(ids, minlength=experts) for ids in used])
