"""What the routes of a dataset look like: load per expert, step and weight version, and reuse between neighbours.

One pass over the data; one row group and the counts are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from storage.choices import also_in, blocks, by_site, no_choices, used_slots
from storage.convert_routes import all_rows
from storage.dataset import Steps, TraceDataset
from storage.drift import add_versions, load_moved
from storage.stats import load_entropy
from storage.trace import RoutingSpec, Site, Trace


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
        loads_of_versions: by weight version int64 `[sites, experts]`, as `storage.choices.count_choices` returns.
    """

    spec: RoutingSpec
    steps: list[int] = field(default_factory=list)
    samples: int = 0
    rows: int = 0
    neighbours: int = 0
    loads_of_versions: dict[int, np.ndarray] = field(default_factory=dict)
    _entropy: list[list[float]] = field(default_factory=list, repr=False)
    _reused: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reused = np.zeros(self.spec.num_sites, np.int64)

    def add_step(self, step: int, traces: Iterable[Trace]) -> None:
        """Count the traces of one step."""
        loads: dict[int, np.ndarray] = {}
        for trace in traces:
            self.samples += 1
            if trace.routed_experts is not None:
                ids, recorded = all_rows(trace, self.spec)
                add_versions(loads, trace.weight_versions, ids, recorded, self.spec)
                self._add_neighbours(ids, recorded)
        for version, counts in loads.items():
            self.loads_of_versions[version] = self.loads_of_versions.get(version, 0) + counts
        if loads:
            self.steps.append(step)
            load = by_site(sum(loads.values(), no_choices(self.spec)), self.spec)
            self.rows += int(load[0].sum()) // self.spec.sites[0].top_k
            self._entropy.append([load_entropy(counts) for counts in load])

    def _add_neighbours(self, ids: np.ndarray, recorded: np.ndarray) -> None:
        used = used_slots(self.spec)
        pairs = np.flatnonzero(recorded[:-1] & recorded[1:])
        self.neighbours += len(pairs)
        for block in blocks(len(pairs)):
            self._reused += also_in(ids[pairs[block] + 1], ids[pairs[block]], used).sum((0, 2))

    def load(self) -> list[np.ndarray]:
        """Of all steps; per site int64 `[num_experts]`, rows that chose each expert."""
        return by_site(sum(self.loads_of_versions.values(), no_choices(self.spec)), self.spec)

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
        """float64 `[sites]`: `load_moved` from one weight version to another, that saw other tokens."""
        return np.array([load_moved(before, after) for _, before, after in self._sites_of(old, new)])

    def moved_by_chance(self, old: int, new: int) -> np.ndarray:
        """float64 `[sites]`: about what `moved_between` gives for equal routers, when rows are independent.

        Half the sum over the experts of E|N(0, p (1 - p) (1 / m + 1 / n))| / K, with p the share of rows that hold the
        expert and m and n the rows of the two versions. Rows of one text are not independent, so it is a lower bound.
        """
        return np.array([_chance(before, after, site.top_k) for site, before, after in self._sites_of(old, new)])

    def _sites_of(self, old: int, new: int) -> Iterator[tuple[Site, np.ndarray, np.ndarray]]:
        loads = (by_site(self.loads_of_versions[version], self.spec) for version in (old, new))
        return zip(self.spec.sites, *loads, strict=True)


def _chance(before: np.ndarray, after: np.ndarray, top_k: int) -> float:
    m, n = before.sum() / top_k, after.sum() / top_k
    p = (before + after) / (m + n)
    return float((np.sqrt(p * (1 - p) * (1 / m + 1 / n))).sum() * np.sqrt(2 / np.pi) / top_k / 2)


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
