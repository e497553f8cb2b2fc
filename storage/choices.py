"""Count and compare the choices in rows `[rows, sites, K]`, all sites at once. Sites may differ in experts and K."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from storage.trace import RoutingSpec

ROWS_AT_ONCE = 8192


def used_slots(spec: RoutingSpec) -> np.ndarray:
    """bool `[sites, K]`: the slots that hold an id; a site of smaller K leaves the rest 0."""
    return np.arange(spec.top_k) < np.array([site.top_k for site in spec.sites])[:, None]


def also_in(ids: np.ndarray, others: np.ndarray, used: np.ndarray) -> np.ndarray:
    """bool `[rows, sites, K]`: whether `others` `[rows, sites, K]` has the id in the same row and site, in any slot.

    >>> also_in(np.array([[[0, 1]]]), np.array([[[1, 2]]]), np.array([[True, True]])).tolist()
    [[[False, True]]]
    """
    found = np.zeros(ids.shape, bool)
    for slot in range(ids.shape[2]):
        found |= (ids == others[:, :, slot, None]) & used[:, slot, None]
    return found & used


def no_choices(spec: RoutingSpec) -> np.ndarray:
    """int64 `[sites, experts]` zeros, to count in; experts are those of the largest site."""
    return np.zeros((spec.num_sites, max(site.num_experts for site in spec.sites)), np.int64)


def count_choices(ids: np.ndarray, chosen: np.ndarray, spec: RoutingSpec) -> np.ndarray:
    """int64 `[sites, experts]`: how often each expert is in `ids` `[rows, sites, K]` where `chosen`, of any shape that
    fits, is True. A site with fewer experts than the largest has zeros behind its own.

    >>> count_choices(np.array([[[0, 1]], [[1, 2]]]), used_slots(spec), spec).tolist()
    [[1, 2, 1, 0]]
    """
    total = no_choices(spec)
    first = np.arange(spec.num_sites)[:, None] * total.shape[1]
    for rows in blocks(len(ids)):
        part = np.broadcast_to(chosen, ids.shape)[rows]
        total += np.bincount((ids[rows] + first)[part], minlength=total.size).reshape(total.shape)
    return total


def by_site(counts: np.ndarray, spec: RoutingSpec) -> list[np.ndarray]:
    """Per site `[num_experts]` of what `count_choices` returns."""
    return [row[: site.num_experts] for row, site in zip(counts, spec.sites, strict=True)]


def blocks(count: int) -> Iterator[slice]:
    """Slices that cover `range(count)`, so that temporary arrays stay small beside long traces."""
    return (slice(start, start + ROWS_AT_ONCE) for start in range(0, count, ROWS_AT_ONCE))
