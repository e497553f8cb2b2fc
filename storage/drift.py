"""Routing drift: how far two datasets send the same tokens to other experts.

They are joined by sample id and compared row by row: row i of both is compared when both recorded it and the tokens up
to i are equal, since a row depends on the tokens before it. Weight versions of one dataset, which saw other tokens, are
compared by load alone: see survey.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from storage.choices import also_in, blocks, count_choices, no_choices, used_slots
from storage.convert_routes import all_rows
from storage.dataset import TraceDataset
from storage.errors import SpecMismatchError
from storage.trace import RoutingSpec, Trace


class SiteDrift(NamedTuple):
    """What changed at one site.

    Attributes:
        overlap: mean share of a row's K experts that both sides chose; 1.0 is the same set in every row.
        same_set: share of rows whose whole set is the same.
        load_moved: share of all assignments that went to another expert on balance; see `load_moved`.
        gained, lost: int64 `[num_experts]`, rows in which only the right, or only the left side chose the expert.
    """

    overlap: float
    same_set: float
    load_moved: float
    gained: np.ndarray
    lost: np.ndarray


@dataclass
class Drift:
    """Counts over the rows added so far; `sites()` gives the figures.

    >>> drift = Drift(spec)
    >>> drift.add(old_trace, new_trace)
    >>> drift.rows, drift.sites()[0].overlap
    (3, 0.8333333333333334)

    Attributes:
        samples: pairs added. other_tokens: of these, pairs whose tokens differ somewhere, compared up to there.
        rows: rows compared. unrecorded: pairs of which one side holds no routes.
        only_left, only_right: samples without a partner, when `compare_datasets` made this.
    """

    spec: RoutingSpec
    samples: int = 0
    other_tokens: int = 0
    unrecorded: int = 0
    rows: int = 0
    only_left: int = 0
    only_right: int = 0
    _same: np.ndarray = field(init=False, repr=False)
    _common: np.ndarray = field(init=False, repr=False)
    _lost: np.ndarray = field(init=False, repr=False)
    _gained: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._used = used_slots(self.spec)
        self._same = np.zeros(self.spec.num_sites, np.int64)
        self._common, self._lost, self._gained = (no_choices(self.spec) for _ in range(3))

    def add(self, left: Trace, right: Trace) -> None:
        """Compare one sample; the order of the ids in a row does not matter."""
        self.samples += 1
        shared = _shared_prefix(left.token_ids, right.token_ids)
        self.other_tokens += shared < max(len(left.token_ids), len(right.token_ids))
        if left.routed_experts is None or right.routed_experts is None:
            self.unrecorded += 1
            return
        (ours, ours_recorded), (theirs, theirs_recorded) = all_rows(left, self.spec), all_rows(right, self.spec)
        both = np.flatnonzero(ours_recorded[:shared] & theirs_recorded[:shared])
        self.rows += len(both)
        for rows in blocks(len(both)):
            self._add_rows(ours[both[rows]], theirs[both[rows]])

    def _add_rows(self, ours: np.ndarray, theirs: np.ndarray) -> None:
        kept, known = also_in(ours, theirs, self._used), also_in(theirs, ours, self._used)
        self._same += (kept == self._used).all(2).sum(0)
        self._common += count_choices(ours, kept, self.spec)
        self._lost += count_choices(ours, ~kept & self._used, self.spec)
        self._gained += count_choices(theirs, ~known & self._used, self.spec)

    def sites(self) -> list[SiteDrift]:
        """One entry per site.

        Raises:
            ValueError: no row was compared.
        """
        if not self.rows:
            raise ValueError(
                f"no row to compare in {self.samples} samples found on both sides: {self.unrecorded} without routes, "
                f"{self.other_tokens} with other tokens"
            )
        return [self._site(index) for index in range(self.spec.num_sites)]

    def _site(self, index: int) -> SiteDrift:
        experts = slice(self.spec.sites[index].num_experts)
        common, lost, gained = (counts[index, experts] for counts in (self._common, self._lost, self._gained))
        return SiteDrift(
            overlap=float(common.sum() / (self.rows * self.spec.sites[index].top_k)),
            same_set=float(self._same[index] / self.rows),
            load_moved=load_moved(common + lost, common + gained),
            gained=gained,
            lost=lost,
        )


def load_moved(before: np.ndarray, after: np.ndarray) -> float:
    """Half the summed difference of two loads' shares (total variation): 0.0 the same load, 1.0 no expert in common.

    >>> load_moved(np.array([2, 2, 0]), np.array([1, 2, 1]))
    0.25

    Raises:
        ValueError: one side counts nothing.
    """
    if not before.sum() or not after.sum():
        raise ValueError(f"loads count {before.sum()} and {after.sum()} assignments, need some on both sides")
    return float(abs(before / before.sum() - after / after.sum()).sum() / 2)


def compare_datasets(left: TraceDataset, right: TraceDataset) -> Drift:
    """The drift from `left` to `right` over the samples that both hold.

    >>> compare_datasets(TraceDataset("before/"), TraceDataset("after/")).sites()[0].same_set
    0.93

    Raises:
        SpecMismatchError: the datasets were recorded with other routers.
        ValueError: no sample id is in both.
    """
    if left.spec != right.spec:
        raise SpecMismatchError(f"{left.root} and {right.root} differ in their routers: {_difference(left, right)}")
    ids = [sample_id for batch in left.scan(columns=["sample_id"]) for sample_id in batch["sample_id"].to_pylist()]
    shared = [sample_id for sample_id in ids if sample_id in right]
    if not shared:
        raise ValueError(
            f"no sample id of {left.root} ({_first(ids)}) is in {right.root}; sample ids are run/step/prompt_key/j: "
            "sample both with the same run name, steps and prompt_keys"
        )
    drift = Drift(left.spec, only_left=len(ids) - len(shared), only_right=len(right) - len(shared))
    for ours, theirs in zip(left.select(shared), right.select(shared), strict=True):
        drift.add(ours, theirs)
    return drift


def _shared_prefix(left: list[int], right: list[int]) -> int:
    length = min(len(left), len(right))
    differ = np.flatnonzero(np.array(left[:length]) != np.array(right[:length]))
    return int(differ[0]) if len(differ) else length


def _difference(left: TraceDataset, right: TraceDataset) -> str:
    pairs = zip(left.spec.sites, right.spec.sites, strict=False)
    other = next(((ours, theirs) for ours, theirs in pairs if ours != theirs), None)
    return f"{other[0]} and {other[1]}" if other else f"{left.spec.num_sites} and {right.spec.num_sites} sites"


def _first(ids: list[str]) -> str:
    return f"{len(ids)} samples, {ids[0]!r} first" if ids else "no samples"
