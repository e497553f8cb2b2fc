"""Weight updates: what becomes of running requests, one at a time, and their two halves. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

InFlight: TypeAlias = Literal["wait", "abort", "keep"]
KVMode: TypeAlias = Literal["keep", "recompute"]


class Unchanging(dict[str, Any]):
    """A state dict whose tensors nobody writes to: an engine may keep it, and load it once more when it comes back."""


WAITS_FOR_EVER = "in_flight='wait' waits for requests that are paused; resume() first, or use 'keep' or 'abort'"


class OneAtATime:
    """Updates, sleep and wake exclude one another; a second one is an error, not a queue.

    >>> turns = OneAtATime()
    >>> with turns.take("sleep"), turns.take("update_weights to version 3"):
    ...     pass
    RuntimeError: update_weights to version 3 while sleep is under way; wait until it has returned
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._what = ""

    @contextlib.contextmanager
    def take(self, what: str) -> Iterator[None]:
        """Hold the turn. Raises RuntimeError when another one is under way, naming it."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"{what} while {self._what} is under way; wait until it has returned")
        try:
            self._what = what
            yield
        finally:
            self._lock.release()


class UpdatesByHalves(ABC):
    """`update_weights` of every backend whose update is checked whole while the old weights serve, then applied."""

    @abstractmethod
    def prepare_update(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False
    ) -> contextlib.AbstractContextManager[Callable[[InFlight, KVMode], None]]:
        """See `Backend.prepare_update`."""

    def update_weights(
        self,
        source: Any,
        version: int,
        *,
        force: bool = False,
        in_flight: InFlight = "wait",
        kv: KVMode = "keep",
        check_finite: bool = False,
    ) -> None:
        """See `RolloutClient.update_weights`: everywhere, or nowhere when any engine refuses."""
        check_modes(in_flight, kv)
        with self.prepare_update(source, version, force=force, check_finite=check_finite) as apply:
            apply(in_flight, kv)


def check_version(version: Any, current: int, force: bool) -> None:
    """Raises ValueError unless `version` is an integer above `current`; with `force` any from 0 on."""
    if type(version) is not int or not 0 <= version < 2**63:
        raise ValueError(f"weight version is {version!r}, need an integer from 0 on")
    if version <= current and not force:
        raise ValueError(f"weight version {version} is not above the current {current}; force=True allows it")


def check_modes(in_flight: str, kv: str) -> None:
    """Raises ValueError for a mode that does not exist."""
    if in_flight not in ("wait", "abort", "keep"):
        raise ValueError(f"in_flight is {in_flight!r}, need 'wait', 'abort' or 'keep'")
    if kv not in ("keep", "recompute"):
        raise ValueError(f"kv is {kv!r}, need 'keep' or 'recompute'")
    if kv == "recompute" and in_flight != "keep":
        raise ValueError(f"kv='recompute' goes with in_flight='keep': after {in_flight!r} no cached key is left")


def check_sleep(level: int, in_flight: str) -> None:
    """Raises ValueError for a level or mode that does not exist."""
    if level not in (1, 2):
        raise ValueError(f"sleep level is {level!r}; 1 keeps a copy of the weights on the host, 2 keeps none")
    if in_flight not in ("wait", "abort"):
        raise ValueError(f"in_flight is {in_flight!r}, need 'wait' or 'abort': sleep frees the cached keys")
