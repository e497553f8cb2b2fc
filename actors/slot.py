"""One place in the pool: the actor that fills it now, replaced when it dies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from actors.placement import Placement
from actors.remote import LOST, fetch, first_line

logger = logging.getLogger(__name__)


class ActorSlot:
    """Holds an actor and the samples it is busy with. Several streams of the pool share a slot.

    `start` begins a new actor in `placement` and returns its handle and the reference of its `load`, which brings the
    current weights and whose answer becomes `info`. `handle` and `loading` change when the actor is replaced, by any
    thread: to use the actor ask for `ready_handle`.
    """

    def __init__(
        self, index: int, start: Callable[[Placement], tuple[Any, Any]], max_attempts: int, placement: Placement
    ) -> None:
        self.index = index
        self.outstanding = 0
        self._start = start
        self._placement = placement
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._deaths = 0
        self._closed = False
        self.info: Any = None
        self.handle, self.loading = start(placement)

    def ready_handle(self) -> Any:
        """The actor, once it has its model, else None; replaces one that died while loading.

        Whoever uses the answer meets a loaded actor or a dead one, never one that has no model yet.

        Raises:
            RuntimeError: nothing was free for it in time.
            Exception: what loading raised, in its own type.
        """
        with self._lock:
            handle, loading = self.handle, self.loading
        if loading is None:
            return handle
        if not ray.wait([loading], timeout=0, fetch_local=False)[0]:
            self._placement.check()
            return None
        try:
            info = fetch(loading)
        except LOST as error:
            self.replace(handle, error)
            return None
        with self._lock:
            if self.handle is not handle:
                return None
            self.loading, self.info = None, info
            return handle

    def assigned(self, samples: int) -> None:
        """Count `samples` more as outstanding; negative when they were cancelled or lost."""
        with self._lock:
            self.outstanding += samples

    def arrived(self, samples: int) -> None:
        """Count `samples` as done; a sign of life that forgives earlier deaths."""
        with self._lock:
            self.outstanding -= samples
            self._deaths = 0

    def replace(self, handle: Any, error: BaseException) -> None:
        """Put a new actor where `handle` died of `error`, unless another stream did already.

        Raises:
            RuntimeError: when the slot's actors keep dying before anything arrives from them.
        """
        with self._lock:
            if self._closed or self.handle is not handle:
                return
            self._deaths += 1
            if self._deaths >= self._max_attempts:
                raise RuntimeError(
                    f"generator actor {self.index} died {self._deaths} times in a row; "
                    f"its last error: {first_line(error)}"
                ) from error
            logger.warning("generator actor %d died and is replaced: %s", self.index, first_line(error))
            ray.kill(handle)
            self.handle, self.loading = self._start(self._placement)

    def close(self) -> None:
        """Kill the actor for good, and give its place back."""
        with self._lock:
            self._closed = True
            ray.kill(self.handle)
            self._placement.remove()
