"""Ask every actor of a pool for the same, so that in the end all have done it or none has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actors.remote import LOST, fetch
from actors.slot import ActorSlot


class Round:
    """One question to all actors and what came back. An actor that died counts as one that will be replaced."""

    def __init__(self, slots: Sequence[ActorSlot], ask: Callable[[Any], Any]) -> None:
        self._slots = slots
        self.handles = [slot.handle for slot in slots]
        self.errors = [_error_of(ref) for ref in [ask(handle) for handle in self.handles]]

    @property
    def refusal(self) -> Exception | None:
        """Why a living actor refused, or, when none is left, how one died."""
        refusals = [error for error in self.errors if error is not None and not isinstance(error, LOST)]
        return refusals[0] if refusals else None if None in self.errors else self.errors[0]

    def replace_failed(self) -> None:
        """New actors, which begin with the pool's current state, where this round failed or another actor answers."""
        for slot, handle, error in zip(self._slots, self.handles, self.errors, strict=True):
            if error is not None:
                slot.replace(handle, error)

    def replace_lost(self) -> None:
        """The same where an actor died; one that refused goes on as it was."""
        for slot, handle, error in zip(self._slots, self.handles, self.errors, strict=True):
            if isinstance(error, LOST):
                slot.replace(handle, error)


def _error_of(ref: Any) -> Exception | None:
    try:
        fetch(ref)
    except Exception as error:
        return error
    return None
