"""What a client adds to its engines' figures, and whom it tells when a step has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rollout.figures import Figures

OnStats = Callable[[Figures], None]


class Reporter:
    """Times commits and calls `on_stats` behind each step; an error of it reaches who sampled, the step is committed.

    >>> reporter = Reporter(lambda: {"engines": 1}, print)
    >>> reporter.commit(lambda: recorder.commit(7)), reporter.step_ended(7)
    {'engines': 1, 'commits_total': 1, 'commit_seconds_total': 0.0021, 'commit_seconds': 0.0021, 'last_step': 7}
    """

    def __init__(self, engines: Callable[[], Figures], on_stats: OnStats | None = None) -> None:
        if on_stats is not None and not callable(on_stats):
            raise TypeError(f"on_stats is {on_stats!r:.80}, need something to call with the figures")
        self._engines, self._on_stats = engines, on_stats
        self._lock = threading.Lock()
        self._commits, self._seconds, self._encoding = 0, 0.0, 0.0
        self._last: Figures = {}

    def stats(self) -> Figures:
        """All figures as they are now; see rollout/figures.py. Those of the last commit or step need one."""
        with self._lock:
            counted = {"encode_seconds_total": self._encoding, "commits_total": self._commits}
            own = {**counted, "commit_seconds_total": self._seconds, **self._last}
        return {"samples_resubmitted_total": 0, **self._engines(), **own}

    def commit(self, commit: Callable[[], bool]) -> bool:
        """Time a commit; one that fails, or of a step without traces, does not count."""
        begun = time.perf_counter()
        if committed := commit():
            seconds = time.perf_counter() - begun
            with self._lock:
                self._commits += 1
                self._seconds += seconds
                self._last["commit_seconds"] = seconds
        return committed

    def write(self, write: Callable[[], None]) -> None:
        """Time the hand-over of finished traces to the recorder."""
        begun = time.perf_counter()
        write()
        with self._lock:
            self._encoding += time.perf_counter() - begun

    def step_ended(self, step: int) -> None:
        """A step has ended and is committed, if anything records it."""
        with self._lock:
            self._last["last_step"] = step
        if self._on_stats is not None:
            self._on_stats(self.stats())
