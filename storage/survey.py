"""What the routes of a dataset look like: load per expert, step and weight version, and reuse between neighbours.

One pass over the data; one row group and the counts are in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from storage.convert_routes import all_rows
from storage.dataset import Steps, TraceDataset
from storage.drift import add_versions, load_moved
from storage.stats import load_entropy
from storage.trace import RoutingSpec, Trace

Load = list[np.ndarray]
"""Per site int64 `[num_experts]`: rows that chose each expert."""


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
        neighbours: pairs of recorded rows of adjacent tokens. loads_of_versions: by weight version.
    """

    spec: RoutingSpec
    steps: list[int] = field(default_factory=list)
    samples: int = 0
    rows: int = 0
    neighbours: int = 0
    loads_of_versions: dict[int, Load] = field(default_factory=dict)
    _entropy: list[list[float]] = field(default_factory=list, repr=False)
    _reused: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._reused = np.zeros(self.spec.num_sites, np.int64)

    def add_step(self, step: int, traces: Iterable[Trace]) -> None:
        """Count the traces of one step."""
        versions: dict[int, Load] = {}
        for trace in traces:
            self.samples += 1
            if trace.routed_experts is not None:
                add_versions(versions, trace, self.spec)
                self._add_neighbours(trace)
        for version, load in versions.items():
            known = self.loads_of_versions.setdefault(version, empty_load(self.spec))
            for total, counts in zip(known, load, strict=True):
                total += counts
        if versions:
            self._add_load_of_step(step, [sum(site) for site in zip(*versions.values(), strict=True)])

    def _add_load_of_step(self, step: int, load: list[np.ndarray]) -> None:
        self.steps.append(step)
        self.rows += int(load[0].sum()) // self.spec.sites[0].top_k
        self._entropy.append([load_entropy(counts) for counts in load])

    def _add_neighbours(self, trace: Trace) -> None:
        ids, recorded = all_rows(trace, self.spec)
        pairs = np.flatnonzero(recorded[:-1] & recorded[1:])
        self.neighbours += len(pairs)
        for index, site in enumerate(self.spec.sites):
            before, now = ids[pairs, index, : site.top_k], ids[pairs + 1, index, : site.top_k]
            self._reused[index] += (now[:, :, None] == before[:, None, :]).any(-1).sum()

    def load(self) -> Load:
        """Of all steps."""
        load = empty_load(self.spec)
        for counts in self.loads_of_versions.values():
            for total, part in zip(load, counts, strict=True):
                total += part
        return load

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
        loads = zip(self.loads_of_versions[old], self.loads_of_versions[new], strict=True)
        return np.array([load_moved(before, after) for before, after in loads])

    def moved_by_chance(self, old: int, new: int) -> np.ndarray:
        """float64 `[sites]`: about what `moved_between` gives for equal routers, when rows are independent.

        Half the sum over the experts of E|N(0, p (1 - p) (1 / m + 1 / n))| / K, with p the share of rows that hold the
        expert and m and n the rows of the two versions. Rows of one text are not independent, so it is a lower bound.
        """
        site_loads = zip(self.spec.sites, self.loads_of_versions[old], self.loads_of_versions[new], strict=True)
        return np.array([_chance(before, after, site.top_k) for site, before, after in site_loads])


def _chance(before: np.ndarray, after: np.ndarray, top_k: int) -> float:
    m, n = before.sum() / top_k, after.sum() / top_k
    p = (before + after) / (m + n)
    return float((np.sqrt(p * (1 - p) * (1 / m + 1 / n))).sum() * np.sqrt(2 / np.pi) / top_k / 2)


def empty_load(spec: RoutingSpec) -> Load:
    """Zero counts."""
    return [np.zeros(site.num_experts, np.int64) for site in spec.sites]


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
