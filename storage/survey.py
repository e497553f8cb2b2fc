"""What the routes of a dataset look like: load per expert, step and weight version, and reuse between neighbours.

One pass over the data; one row group and the counts are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from storage.choices import also_in, blocks, by_site, count_choices, no_choices, used_slots
from storage.convert_routes import all_rows
from storage.dataset import Steps, TraceDataset
from storage.stats import load_entropy
from storage.trace import RoutingSpec, Trace, WeightSpan


@dataclass
class Survey:
    """Counts of the steps added so far.

    >>> survey = survey_dataset(TraceDataset("traces/"))
    >>> survey.rows, survey.steps, survey.entropy().shape      # [steps, sites]
    (3388, [0], (1, 8))
    >>> survey.reuse()[0], survey.chance()[0]                  # neighbours share more experts than strangers
    (0.31, 0.14)

    Attributes:
        steps: those with a recorded row, in the order added. rows: recorded. samples: all, with routes or not.
        neighbours: pairs of recorded rows of adjacent tokens.
    """

    spec: RoutingSpec
    steps: list[int] = field(default_factory=list)
    samples: int = 0
    rows: int = 0
    neighbours: int = 0
    _first_halves: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    _second_halves: dict[int, np.ndarray] = field(default_factory=dict, repr=False)
    _entropy: list[list[float]] = field(default_factory=list, repr=False)
    _reused: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reused = np.zeros(self.spec.num_sites, np.int64)

    def add_step(self, step: int, traces: Iterable[Trace]) -> None:
        """Count the traces of one step."""
        halves: tuple[dict[int, np.ndarray], dict[int, np.ndarray]] = ({}, {})
        for trace in traces:
            self.samples += 1
            if trace.routed_experts is not None:
                ids, recorded = all_rows(trace, self.spec)
                half = halves[blake2b(trace.group_id.encode(), digest_size=1).digest()[0] % 2]
                add_versions(half, trace.weight_versions, ids, recorded, self.spec)
                self._add_neighbours(ids, recorded)
        for total, loads in zip((self._first_halves, self._second_halves), halves, strict=True):
            for version, counts in loads.items():
                total[version] = total.get(version, 0) + counts
        if halves[0] or halves[1]:
            self.steps.append(step)
            load = by_site(self._sum(*halves[0].values(), *halves[1].values()), self.spec)
            self.rows += int(load[0].sum()) // self.spec.sites[0].top_k
            self._entropy.append([load_entropy(counts) for counts in load])

    def _sum(self, *loads: np.ndarray) -> np.ndarray:
        return sum(loads, no_choices(self.spec))

    def _add_neighbours(self, ids: np.ndarray, recorded: np.ndarray) -> None:
        used = used_slots(self.spec)
        pairs = np.flatnonzero(recorded[:-1] & recorded[1:])
        self.neighbours += len(pairs)
        for block in blocks(len(pairs)):
            self._reused += also_in(ids[pairs[block] + 1], ids[pairs[block]], used).sum((0, 2))

    def load(self) -> list[np.ndarray]:
        """Of all steps; per site int64 `[num_experts]`, rows that chose each expert."""
        return by_site(self._sum(*self._first_halves.values(), *self._second_halves.values()), self.spec)

    def load_of(self, version: int) -> list[np.ndarray]:
        """Of the rows computed with one weight version, as `load`; zeros when there are none."""
        return by_site(self._sum(*self._halves(version)), self.spec)

    @property
    def versions(self) -> list[int]:
        """The weight versions with a recorded row, ascending."""
        return sorted({*self._first_halves, *self._second_halves})

    def entropy(self) -> np.ndarray:
        """float64 `[steps, sites]`: `storage.stats.load_entropy` of the step's load, 1.0 when it is balanced."""
        return np.array(self._entropy).reshape(len(self.steps), self.spec.num_sites)

    def reuse(self) -> np.ndarray:
        """float64 `[sites]`: share of a token's experts that the token before it chose too.

        Raises:
            ValueError: no two neighbouring rows are recorded.
        """
        if not self.neighbours:
            raise ValueError("no two neighbouring tokens have recorded routes, so nothing can be said about reuse")
        return self._reused / (self.neighbours * np.array([site.top_k for site in self.spec.sites]))

    def chance(self) -> np.ndarray:
        """float64 `[sites]`: the reuse of two tokens drawn at random: the sum over the experts of p^2 / K, with p the
        share of rows that hold the expert."""
        share = zip(self.spec.sites, self.load(), strict=True)
        return np.array([((counts / self.rows) ** 2).sum() / site.top_k for site, counts in share])

    def moved_between(self, old: int, new: int) -> np.ndarray:
        """float64 `[sites]`: `storage.drift.load_moved` from one weight version to another, that saw other tokens."""
        return _moved(self._sum(*self._halves(old)), self._sum(*self._halves(new)))

    def moved_by_chance(self, old: int, new: int) -> np.ndarray:
        """float64 `[sites]`: about what `moved_between` gives for equal routers because prompts differ.

        Estimated from the load that moves between two halves of a version's prompts, over all versions; the samples of
        one prompt stay together, as they route alike. nan where each version has its prompts in one half.
        """
        return np.sqrt(self._spread() * sum(1 / self._sum(*self._halves(version))[0].sum() for version in (old, new)))

    def _spread(self) -> np.ndarray:
        """s `[sites]`, when the square of what moves by chance between loads of a and b rows is s (1/a + 1/b)."""
        halves = [self._halves(version) for version in self.versions]
        known = [
            _moved(one, other) ** 2 / (1 / one[0].sum() + 1 / other[0].sum())
            for one, other in halves
            if one.any() and other.any()
        ]
        return np.mean(known, axis=0) if known else np.full(self.spec.num_sites, np.nan)

    def _halves(self, version: int) -> tuple[np.ndarray, np.ndarray]:
        empty = no_choices(self.spec)
        return self._first_halves.get(version, empty), self._second_halves.get(version, empty)


def add_versions(
    loads: dict[int, np.ndarray],
    spans: Sequence[WeightSpan],
    ids: np.ndarray,
    recorded: np.ndarray,
    spec: RoutingSpec,
) -> None:
    """Add the rows of a trace, as `all_rows` returns them, to loads `[sites, experts]` per weight version. A version
    without a recorded row gets no entry."""
    for version, start, end in spans:
        rows = ids[start:end][recorded[start:end]]
        if len(rows):
            counts = count_choices(rows, used_slots(spec), spec)
            loads[version] = loads[version] + counts if version in loads else counts


def _moved(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    shares = (load / load.sum(1, keepdims=True) for load in (before, after))
    return abs(np.subtract(*shares)).sum(1) / 2


def survey_dataset(dataset: TraceDataset, steps: Steps = None) -> Survey:
    """Count one step, several, or all.

    Raises:
        ValueError: these steps hold no recorded row.
    """
    survey = Survey(dataset.spec)
    for step in dataset.steps if steps is None else [steps] if isinstance(steps, int) else steps:
        survey.add_step(step, dataset.iter(step))
    if not survey.rows:
        raise ValueError(
            f"none of the {survey.samples} samples of {dataset.root} has recorded routes; "
            "sample with enable_return_routed_experts=True"
        )
    return survey
