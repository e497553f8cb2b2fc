"""Figures about recorded routes and logprobs: expert load, its entropy, agreement of two traces, mismatch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from storage.convert_routes import all_rows
from storage.trace import RoutingSpec, Trace


def expert_load(traces: Iterable[Trace], spec: RoutingSpec) -> list[np.ndarray]:
    """Per site int64 `[num_experts]`: how many recorded rows chose each expert; traces without routes count nothing.

    >>> expert_load(traces, spec)[0]  # 3 recorded rows, top 2
    array([1, 3, 1, 1])
    """
    load = [np.zeros(site.num_experts, np.int64) for site in spec.sites]
    for trace in traces:
        add_load(load, trace, spec)
    return load


def add_load(load: list[np.ndarray], trace: Trace, spec: RoutingSpec) -> None:
    """Add the recorded rows of one trace to `load`, as `expert_load` counts them."""
    if trace.routed_experts is None:
        return
    ids, recorded = all_rows(trace, spec)
    rows = ids[recorded]
    for index, site in enumerate(spec.sites):
        load[index] += np.bincount(rows[:, index, : site.top_k].reshape(-1), minlength=site.num_experts)


def load_entropy(counts: np.ndarray) -> float:
    """Entropy of one site's load as a share of the balanced one: 1.0 is balanced, 0.0 one expert or no rows.

    >>> load_entropy(np.array([2, 2, 0, 0]))
    0.5
    """
    share = counts / max(counts.sum(), 1)
    used = share[share > 0]
    return float(abs((used * np.log(used)).sum()) / np.log(max(len(share), 2)))


def agreement(left: Trace, right: Trace, spec: RoutingSpec) -> np.ndarray:
    """Per site float64: the share of rows, recorded in both traces, that chose the same set of experts.

    Raises:
        ValueError: other token ids, no routes, or no row that both recorded.
    """
    if left.token_ids != right.token_ids:
        raise ValueError(f"traces {left.sample_id!r} and {right.sample_id!r} have different token ids; compare equals")
    (ours, ours_recorded), (theirs, theirs_recorded) = all_rows(left, spec), all_rows(right, spec)
    both = ours_recorded & theirs_recorded
    if not both.any():
        raise ValueError(f"traces {left.sample_id!r} and {right.sample_id!r} recorded no row in common")
    return (np.sort(ours[both], -1) == np.sort(theirs[both], -1)).all(-1).mean(0)


def mismatch(rollout: Any, trainer: Any) -> dict[str, float]:
    """How far logprobs of the same sampled tokens differ, for d = trainer - rollout and n tokens.

    k1 = mean(-d) and k3 = mean(exp(d) - 1 - d) estimate KL(rollout || trainer) in nats; mean_abs and max_abs are of d.

    Raises:
        ValueError: another shape, no tokens, or a logprob that is not finite.
    """
    ours, theirs = np.asarray(rollout, np.float64), np.asarray(trainer, np.float64)
    if ours.shape != theirs.shape or not ours.size:
        raise ValueError(f"logprobs have shapes {ours.shape} and {theirs.shape}, need the same and not empty")
    d = theirs - ours
    if not np.isfinite(d).all():
        raise ValueError(f"a logprob at position {int((~np.isfinite(d)).argmax())} is not finite; mask it out")
    return {
        "k1": float(-d.mean()),
        "k3": float((np.expm1(d) - d).mean()),
        "mean_abs": float(abs(d).mean()),
        "max_abs": float(abs(d).max()),
    }
