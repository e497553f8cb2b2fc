"""An engine that stands still while it has work is killed, and so replaced like one that died."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from actors.remote import LOST, fetch

logger = logging.getLogger(__name__)
ASKS = 4


class Watchdog:
    """Follows the progress of the actors that one stream waits for.

    Time counts only while the stream is being read: a consumer that pauses stops its engines, and that is no stall.

    Args:
        seconds: without a token, or without an answer, until an actor counts as standing still.
        clock: seconds, for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._looked = clock()
        self._followed: dict[Any, _Followed] = {}

    def look(self, actors: dict[Any, int]) -> None:
        """Called again and again with the actors (handle: index) that have work; kills those that stand still."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, self._seconds / ASKS), now
        self._followed = {handle: self._followed.get(handle) or _Followed() for handle in actors}
        for handle, followed in self._followed.items():
            followed.still_for += passed
            followed.ask(handle, self._seconds / ASKS)
            if followed.still_for > self._seconds:
                logger.warning(
                    "generator actor %d made no token for %.0f s and is killed", actors[handle], followed.still_for
                )
                ray.kill(handle)
                followed.still_for = 0.0


class _Followed:
    """One actor: its progress when it last answered, and how long it has not moved."""

    def __init__(self) -> None:
        self.still_for = 0.0
        self._progress: int | None = None
        self._asked_at = 0.0
        self._answer: Any = None

    def ask(self, handle: Any, every: float) -> None:
        """Read the answer that came, if one did; ask again after `every` seconds of standing still."""
        if self._answer is not None and ray.wait([self._answer], timeout=0)[0]:
            self._read()
        if self._answer is None and (self._progress is None or self.still_for - self._asked_at >= every):
            self._answer, self._asked_at = handle.health.remote(), self.still_for

    def _read(self) -> None:
        answer, self._answer = self._answer, None
        try:
            progress = fetch(answer)["progress"]
        except LOST:
            return  # its calls end with the same, and see to a new actor
        if progress is None or progress != self._progress:  # an engine that counts nothing is not followed
            self._progress, self.still_for, self._asked_at = progress, 0.0, 0.0
