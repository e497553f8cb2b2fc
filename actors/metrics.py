"""Ray's metrics of a run: what rollout/figures.py names, as `ray_moe_rollout_<name>` at each node's metrics endpoint.

Each process tells its own: a generator actor its engine's figures, the sink how long commits take, the driver which
samples it had to give to another actor. Ray labels each series with node and worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from actors.remote import LOST, fetch, first_line
from rollout.figures import CLIENT, ENGINE, Figure, Figures, merge

logger = logging.getLogger(__name__)
PREFIX = "moe_rollout_"
PUBLISH_SECONDS = 2.0
ANSWER_SECONDS = 5.0
COMMIT_BOUNDS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
_TEXTS = {figure.name: figure.text for figure in (*ENGINE, *CLIENT)}


class Published:
    """Some figures as Ray metrics. Counters are told what was added since the last time; not thread-safe.

    A total that is lower than the last time is that of an engine that was started again, and counts from 0.

    >>> published = Published(ENGINE)
    >>> published.set(backend.figures())
    """

    def __init__(self, figures: tuple[Figure, ...]) -> None:
        self._gauges = {f.name: Gauge(PREFIX + f.name, description=f.text) for f in figures if not f.grows}
        self._counters = {f.name: Counter(PREFIX + f.name, description=f.text) for f in figures if f.grows}
        self._told: Figures = {}

    def set(self, figures: Figures) -> None:
        """Tell Ray; names that are absent are not told."""
        for name, value in figures.items():
            if name in self._gauges:
                self._gauges[name].set(value)
            elif name in self._counters:
                told = self._told.get(name, 0)
                if added := value - told if value >= told else value:
                    self._counters[name].inc(added)
                self._told[name] = value


class Publisher:
    """Tells Ray an engine's figures every few seconds, from a thread of its own, until `close`."""

    def __init__(self, read: Callable[[], Figures], every_s: float = PUBLISH_SECONDS) -> None:
        self._read, self._every, self._ended = read, every_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="moe-rollout-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell them once more and end; not waited for where an engine that starts again cannot say them."""
        self._ended.set()
        self._thread.join(self._every)

    def _run(self) -> None:
        published = Published(ENGINE)
        while True:
            ended = self._ended.wait(self._every)
            try:
                published.set(self._read())
            except Exception:
                logger.exception("an engine that cannot say its figures has no metrics from now on")
                return
            if ended:
                return


class CommitMetrics:
    """Commits of a sink: how many, how long, and their distribution.

    Ray keeps the sum of a histogram by the middles of its buckets, hence the counter of seconds beside it.
    """

    def __init__(self) -> None:
        self._count, self._seconds = (
            Counter(PREFIX + name, description=_TEXTS[name]) for name in ("commits_total", "commit_seconds_total")
        )
        text = "distribution of the time until a commit was durable"
        self._distribution = Histogram(PREFIX + "commit_latency_seconds", description=text, boundaries=COMMIT_BOUNDS)

    def observe(self, seconds: float) -> None:
        """Count a commit."""
        self._count.inc()
        self._seconds.inc(seconds)
        self._distribution.observe(seconds)


class ResubmitMetrics:
    """Samples that were given to another actor because theirs died."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()
        name = "samples_resubmitted_total"
        self._counter = Counter(PREFIX + name, description=_TEXTS[name])

    def add(self, samples: int) -> None:
        """Count some."""
        with self._lock:
            self.total += samples
        if samples:
            self._counter.inc(samples)


def ask_figures(handles: Sequence[Any]) -> Figures:
    """The figures of the actors that answer within `ANSWER_SECONDS`, as if they were one engine."""
    refs = [handle.figures.remote() for handle in handles]
    answers, silent = ray.wait(refs, num_returns=len(refs), timeout=ANSWER_SECONDS) if refs else ([], [])
    if silent:
        logger.warning("%d of %d generator actors did not answer in %.0f s", len(silent), len(refs), ANSWER_SECONDS)
    found = []
    for answer in answers:
        try:
            found.append(fetch(answer))
        except LOST as error:
            logger.warning("figures without those of a generator actor that died: %s", first_line(error))
    return {"engines": 0, **merge(found)}
