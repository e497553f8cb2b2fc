"""Which step a call belongs to, and who commits it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

from storage.errors import StepExistsError


class Call(NamedTuple):
    """One `sample` or `stream` call: its step, its number within the step, whether its end commits the step."""

    step: int
    number: int
    commits: bool


class StepLedger:
    """Numbers steps and calls. A bare call is a step of its own; between `open` and `close` calls share one step.

    >>> ledger = StepLedger(committed=[0, 1], unique=True)
    >>> ledger.begin(None)
    Call(step=2, number=0, commits=True)

    Args:
        committed: steps the dataset already has.
        unique: refuse a step twice (there is a dataset); without one, numbers are only labels.
    """

    def __init__(self, committed: Iterable[int], unique: bool) -> None:
        self._used = set(committed)
        self._unique = unique
        self._open: int | None = None
        self._calls_in_step = 0
        self._running = 0
        self._spoiled = False
        self._lock = threading.Lock()

    def begin(self, step: int | None) -> Call:
        """Start a call.

        Raises:
            StepExistsError: the step is committed, or another call is writing it.
            ValueError: the call names another step than the open one.
        """
        with self._lock:
            if self._open is not None:
                return self._join_open(step)
            chosen = max(self._used, default=-1) + 1 if step is None else step
            self._claim(chosen)
            return Call(chosen, 0, commits=True)

    def _join_open(self, step: int | None) -> Call:
        if step not in (None, self._open):
            raise ValueError(f"step={step} inside `with client.step({self._open})`; leave step out")
        number = self._calls_in_step
        self._calls_in_step += 1
        self._running += 1
        return Call(self._open or 0, number, commits=False)

    def _claim(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"step {step} is negative")
        if self._unique and step in self._used:
            raise StepExistsError(f"step {step} exists already; use step={max(self._used) + 1} or leave step out")
        self._used.add(step)

    def end(self, call: Call, done: bool) -> None:
        """Finish a call. A bare call that did not commit gives its step number back; one inside an open step that was
        left early or failed spoils the step."""
        with self._lock:
            if not call.commits:
                self._running -= 1
                self._spoiled |= not done
            elif not done:
                self._used.discard(call.step)

    def cancel(self, call: Call) -> None:
        """Undo `begin` of a call that never started."""
        with self._lock:
            if call.commits:
                self._used.discard(call.step)
            else:
                self._running -= 1
                self._calls_in_step -= 1

    def check_complete(self) -> None:
        """Raises RuntimeError when calls of the open step still run, or one of them did not finish."""
        with self._lock:
            if self._running or self._spoiled:
                state = f"{self._running} calls still run" if self._running else "a call was left early or failed"
                raise RuntimeError(f"step {self._open}: {state}; nothing was committed")

    def open(self, step: int) -> None:
        """Gather the following calls into one step."""
        with self._lock:
            if self._open is not None:
                raise ValueError(f"step {self._open} is still open; steps do not nest")
            self._claim(step)
            self._open, self._calls_in_step, self._spoiled = step, 0, False

    def close(self, committed: bool) -> None:
        """End the open step."""
        with self._lock:
            step, self._open = self._open, None
            if not committed and step is not None:
                self._used.discard(step)
