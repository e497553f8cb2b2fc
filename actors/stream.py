"""One `ActorPool.stream` call, which any thread may end."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

from actors.dispatch import Dispatch
from actors.finished import RemoteFinished


class PoolStream(Iterator[RemoteFinished]):
    """Yields each sample once, as they finish. Implements `rollout.backend.FinishedStream`.

    An iterator that waits in one thread notices within `dispatch.POLL_SECONDS` what another thread asks for:

    - `abort` answers every sample that has not arrived with a trace without tokens and finish_reason "abort", so that
      each request still comes back exactly once.
    - `close` drops them, and the iterator ends.

    Both stop the actors' work on exactly these requests and leave other streams alone.
    """

    def __init__(self, dispatch: Dispatch, items: Generator[RemoteFinished, None, None]) -> None:
        self._dispatch, self._items = dispatch, items
        self._turn = threading.Lock()

    def __next__(self) -> RemoteFinished:
        with self._turn:
            return next(self._items)

    def abort(self) -> None:
        """End all requests now; the iterator yields the rest as aborted."""
        self._dispatch.aborted.set()
        with self._turn:
            self._dispatch.cancel_calls()

    def close(self) -> None:
        """End all requests now, and the iteration."""
        self._dispatch.left.set()
        with self._turn:
            self._items.close()
