"""How far a step is: a bar in a terminal, among what actors print; in a log, such as a job's, a line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any, Self

logger = logging.getLogger("actors.pipeline")
EVERY_S = 30.0


class Progress:
    """Counts the samples of one step.

    >>> with Progress(400, "step 3") as progress:
    ...     progress.update()      # in a log, after 30 s: step 3: 120 of 400 samples, 4 a second

    Args:
        bar: whether to draw one; by default when stderr is a terminal. It is Ray's, which keeps it apart from the
            lines that actors print.
        clock: seconds, for tests.
    """

    def __init__(
        self, total: int, label: str, bar: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._label, self._clock = total, label, clock
        self._done, self._begun = 0, clock()
        self._next = self._begun + EVERY_S
        self._bar: Any = None
        if sys.stderr.isatty() if bar is None else bar:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(total=total, desc=label, unit="sample")

    def update(self) -> None:
        """One sample more."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif (now := self._clock()) >= self._next:
            self._next = now + EVERY_S
            rate = self._done / (now - self._begun)
            logger.info("%s: %d of %d samples, %.2g a second", self._label, self._done, self._total, rate)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
