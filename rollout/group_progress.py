"""How far a group has come, for a watchdog that must not wait for a rank that stands still."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from rollout.rank_link import RankSet


class GroupProgress:
    """Tokens that the ranks of a group have computed, as of when they were last asked. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: RankSet | None = None
        self._asked: list[Future[Any]] = []
        self._before = self._known = 0

    def of(self, ranks: RankSet | None) -> int | None:
        """Grows while these ranks compute, and when others take their place. Asks them, for the next call, and returns
        at once what they said before; None while there are none: loading a model makes no token.
        """
        with self._lock:
            if ranks is None:
                return None
            if ranks is not self._ranks:
                self._before, self._known = self._before + self._known + 1, 0
                self._ranks, self._asked = ranks, []
            if all(future.done() for future in self._asked):
                if self._asked and not any(future.exception() for future in self._asked):
                    self._known = sum(int(future.result()["tokens_computed_total"]) for future in self._asked)
                self._asked = ranks.ask_later("figures")
            return self._before + self._known
