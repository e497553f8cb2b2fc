"""What `moe-rollout inspect` shows: the figures of a dataset, from one pass over its traces."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from storage.dataset import Steps, TraceDataset
from storage.stats import add_load, load_entropy
from storage.trace import RoutingSpec, Site, Trace

SLOWEST = 5


class Slow(NamedTuple):
    """One of the samples that took longest. The larger is the slower."""

    seconds: float
    sample_id: str
    tokens: int
    completion_tokens: int
    finish_reason: str


def summarise(dataset: TraceDataset, step: Steps = None, *, slowest: int = SLOWEST) -> dict[str, Any]:
    """Figures of the samples of one step, of several or of all; JSON values. Reads everything once.

    `completion_tokens_per_sample`, `seconds_per_sample` and `rewards` are `{"count", "mean", "std", "min", "max",
    "not_finite"}`, or None when no sample has any; when none is finite, `count` is 0 and the next four are
    None. A row that could have been recorded and was not is a missing one. `bytes` are those of the Parquet files, and
    None when only some steps are asked for: steps may share a file.

    >>> figures = summarise(TraceDataset("traces/"))
    >>> figures["samples"], figures["finish_reasons"], figures["rows"]
    (400, {'stop': 398, 'length': 2}, {'expected': 3388, 'recorded': 3388, 'missing': 0, 'samples_without_routes': 0})
    >>> figures["sites"][0]["load_entropy"]  # 1.0 when all experts are chosen equally often
    0.93
    """
    steps = dataset.steps if step is None else [step] if isinstance(step, int) else list(step)
    tally = Tally(dataset.spec, steps, slowest)
    for trace in dataset.iter(steps):
        tally.add(trace)
    size = dataset.num_bytes() if step is None else None
    return {
        "dataset": str(dataset.root),
        "frozen_recompute": dataset.frozen_recompute,
        "slot_order": dataset.slot_order,
        **tally.figures(),
        "bytes": size,
        "bytes_per_token": None if size is None or not tally.tokens else size / tally.tokens,
        "route_bytes_per_token": dataset.spec.row_bytes,
    }


class Tally:
    """Sums over traces of one spec and of these steps, of which some may be empty."""

    def __init__(self, spec: RoutingSpec, steps: Sequence[int], slowest: int = SLOWEST) -> None:
        self._spec, self._most = spec, slowest
        self._load = [np.zeros(site.num_experts, np.int64) for site in spec.sites]
        self._steps = {step: Counter(samples=0, tokens=0, missing_rows=0) for step in sorted(steps)}
        self._step_rewards = {step: Moments() for step in steps}
        self._reasons: Counter[str] = Counter()
        self._version_rows: Counter[int] = Counter()
        self._groups: set[str] = set()
        self._completions, self._rewards, self._seconds = Moments(), Moments(), Moments()
        self._prompt_tokens = self._expected = self._recorded = self._without_routes = 0
        self._slowest: list[Slow] = []  # a heap, the fastest of them first

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of all samples."""
        return self._prompt_tokens + int(self._completions.total)

    def add(self, trace: Trace) -> None:
        """Count one trace."""
        add_load(self._load, trace, self._spec)
        recorded = trace.route_len if trace.route_valid is None else int(trace.route_valid.sum())
        self._prompt_tokens += len(trace.prompt_ids)
        self._completions.add(len(trace.completion_ids))
        self._expected += trace.num_rows
        self._recorded += recorded
        self._without_routes += trace.routed_experts is None
        self._groups.add(trace.group_id)
        self._reasons[trace.finish_reason] += 1
        for span in trace.weight_versions:
            self._version_rows[span.version] += span.row_end - span.row_start
        counts = {"samples": 1, "tokens": len(trace.token_ids), "missing_rows": trace.num_rows - recorded}
        self._steps[trace.step].update(counts)
        if trace.reward is not None:
            self._rewards.add(trace.reward)
            self._step_rewards[trace.step].add(trace.reward)
        if trace.seconds is not None:
            self._seconds.add(trace.seconds)
        if trace.seconds is not None and math.isfinite(trace.seconds):
            numbers = len(trace.token_ids), len(trace.completion_ids)
            self._add_slow(Slow(trace.seconds, trace.sample_id, *numbers, trace.finish_reason))

    def _add_slow(self, sample: Slow) -> None:
        heapq.heappush(self._slowest, sample)
        if len(self._slowest) > self._most:
            heapq.heappop(self._slowest)

    def figures(self) -> dict[str, Any]:
        """The figures, as `summarise` returns them."""
        steps = list(self._steps)
        return {
            "steps": {"count": len(steps), "first": steps[0] if steps else None, "last": steps[-1] if steps else None},
            "samples": self._reasons.total(),
            "groups": len(self._groups),
            "tokens": {"prompt": self._prompt_tokens, "completion": int(self._completions.total), "all": self.tokens},
            "completion_tokens_per_sample": self._completions.figures(),
            "finish_reasons": dict(self._reasons.most_common()),
            "weight_versions": [{"version": v, "rows": self._version_rows[v]} for v in sorted(self._version_rows)],
            "rewards": self._rewards.figures(),
            "rows": {
                "expected": self._expected,
                "recorded": self._recorded,
                "missing": self._expected - self._recorded,
                "samples_without_routes": self._without_routes,
            },
            "by_step": [{"step": step, **self._steps[step], "reward": self._step_rewards[step].mean} for step in steps],
            "sites": [site_figures(site, load) for site, load in zip(self._spec.sites, self._load, strict=True)],
            "seconds_per_sample": self._seconds.figures(),
            "slowest": [sample._asdict() for sample in sorted(self._slowest, reverse=True)],
        }


def site_figures(site: Site, load: np.ndarray) -> dict[str, Any]:
    """Balance of one site. `choices` counts recorded rows times K; without any the other figures are None.

    >>> site_figures(Site("layers.0.gate", 0, 4, 2), np.array([1, 3, 1, 1]))["busiest_over_mean"]
    2.0
    """
    choices = int(load.sum())
    return {
        "site": site.name,
        "layer": site.layer,
        "num_experts": site.num_experts,
        "top_k": site.top_k,
        "choices": choices,
        "load_entropy": load_entropy(load) if choices else None,
        "busiest_expert": int(load.argmax()) if choices else None,
        "busiest_over_mean": float(load.max() / load.mean()) if choices else None,
        "idle_experts": int((load == 0).sum()) if choices else None,
    }


class Moments:
    """Count, mean, spread (Welford's update) and bounds of the finite numbers, and how many were not finite.

    >>> moments = Moments(); moments.add(1.0); moments.add(3.0); moments.figures()
    {'count': 2, 'mean': 2.0, 'std': 1.0, 'min': 1.0, 'max': 3.0, 'not_finite': 0}
    """

    def __init__(self) -> None:
        self.count, self.total, self._around, self._squares = 0, 0.0, 0.0, 0.0
        self._min, self._max, self._not_finite = math.inf, -math.inf, 0

    def add(self, value: float) -> None:
        """Count one number."""
        if not math.isfinite(value):
            self._not_finite += 1
            return
        self.count += 1
        self.total += value
        step = value - self._around
        self._around += step / self.count
        self._squares += step * (value - self._around)
        self._min, self._max = min(self._min, value), max(self._max, value)

    @property
    def mean(self) -> float | None:
        """None without a number."""
        return self.total / self.count if self.count else None

    def figures(self) -> dict[str, float | None] | None:
        """None when nothing was added; `std` divides by the count. Without finite ones only counts are known."""
        if not self.count:
            unknown = dict.fromkeys(("mean", "std", "min", "max"))
            return {"count": 0, **unknown, "not_finite": self._not_finite} if self._not_finite else None
        return {
            "count": self.count,
            "mean": self.total / self.count,
            "std": math.sqrt(self._squares / self.count),
            "min": self._min,
            "max": self._max,
            "not_finite": self._not_finite,
        }
