"""Which step a call belongs to, and who commits it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from storage.errors import StepExistsError


class Call(NamedTuple):
    """One `sample` or `stream` call: its step, its number within the step, whether its end commits the step.

    `opening` counts the `with client.step(n)` blocks: a call that outlives its block takes no part in the next.
    """

    step: int
    number: int
    commits: bool
    opening: int = 0


class StepLedger:
    """Numbers steps and calls. A bare call is a step of its own; between `open` and `close` calls share one step.

    >>> ledger = StepLedger(committed=lambda: [0, 1], unique=True)
    >>> ledger.begin(None)
    Call(step=2, number=0, commits=True, opening=0)

    Args:
        committed: the steps that the dataset has by now; other clients may write it too.
        unique: refuse a step twice (there is a dataset); without one, numbers are only labels.
    """

    def __init__(self, committed: Callable[[], Iterable[int]], unique: bool) -> None:
        self._committed = committed
        self._used: set[int] = set()
        self._unique = unique
        self._open: int | None = None
        self._opening = 0
        self._calls_in_step = 0
        self._running = 0
        self._spoiled = False
        self._lock = threading.Lock()

    @property
    def open_step(self) -> int | None:
        """The step that gathers calls at the moment."""
        return self._open

    def check(self, step: int | None) -> None:
        """Raise what `begin` would raise now, and claim nothing."""
        with self._lock:
            if self._open is not None:
                self._check_names_open(step)
            elif step is not None:
                self._check_free(step)

    def begin(self, step: int | None) -> Call:
        """Start a call.

        Raises:
            StepExistsError: the step is committed, or another call is writing it.
            ValueError: the call names another step than the open one.
        """
        with self._lock:
            if self._open is not None:
                self._check_names_open(step)
                self._calls_in_step += 1
                self._running += 1
                return Call(self._open, self._calls_in_step - 1, False, self._opening)
            chosen = max(self._taken(), default=-1) + 1 if step is None else step
            self._check_free(chosen)
            self._used.add(chosen)
            return Call(chosen, 0, commits=True)

    def end(self, call: Call, done: bool) -> None:
        """Finish a call. A bare call that did not commit gives its step number back; one inside an open step that was
        left early or failed spoils the step."""
        with self._lock:
            if call.commits and not done:
                self._used.discard(call.step)
            elif not call.commits and self._is_live(call):
                self._running -= 1
                self._spoiled |= not done

    def is_live(self, call: Call) -> bool:
        """False when the `with client.step(n)` block of the call has ended."""
        with self._lock:
            return call.commits or self._is_live(call)

    def _is_live(self, call: Call) -> bool:
        return self._open is not None and call.opening == self._opening

    def open(self, step: int) -> None:
        """Gather the following calls into one step."""
        with self._lock:
            if self._open is not None:
                raise ValueError(f"step {self._open} is still open; steps do not nest")
            self._check_free(step)
            self._used.add(step)
            self._open, self._opening = step, self._opening + 1
            self._calls_in_step, self._running, self._spoiled = 0, 0, False

    def check_complete(self) -> None:
        """Raises RuntimeError when calls of the open step still run, or one of them did not finish."""
        with self._lock:
            if self._running or self._spoiled:
                state = f"{self._running} calls still run" if self._running else "a call was left early or failed"
                raise RuntimeError(f"step {self._open}: {state}; nothing was committed")

    def close(self, committed: bool) -> None:
        """End the open step."""
        with self._lock:
            step, self._open = self._open, None
            if not committed and step is not None:
                self._used.discard(step)

    def _taken(self) -> set[int]:
        return self._used.union(self._committed())

    def _check_names_open(self, step: int | None) -> None:
        if step not in (None, self._open):
            raise ValueError(f"step={step} inside `with client.step({self._open})`; leave step out")

    def _check_free(self, step: int) -> None:
        if type(step) is not int or not 0 <= step < 2**63:
            raise ValueError(f"step is {step!r}, need an integer from 0 on")
        if self._unique and step in (taken := self._taken()):
            raise StepExistsError(f"step {step} exists already; use step={max(taken) + 1} or leave step out")
