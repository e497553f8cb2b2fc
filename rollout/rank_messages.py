"""What a group's front end and its ranks tell each other. The ends are rank_link.py and rank_process.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from rollout.lockstep import Membership

LOAD = -1
"""Number of the answer that says that a rank has its model; after that, of a rank's last words."""


@dataclass(frozen=True)
class RankStart:
    """What a rank is started with."""

    model: str
    member: Membership
    engine_options: dict[str, Any] = field(default_factory=dict)


class Command(NamedTuple):
    """Call the method `name` of `RankServer`; `epoch` counts commands, so that ranks rest and wake together."""

    epoch: int
    name: str
    args: tuple[Any, ...] = ()
    answer: int | None = None


class Answer(NamedTuple):
    """Of the command that asked for it: a value, or the error that it raised."""

    answer: int
    value: Any = None
    error: Exception | None = None


class Ended(NamedTuple):
    """A sample's trace as a table of one row, or the error of its request."""

    ticket: int
    table: pa.Table | None
    error: Exception | None = None


Message: TypeAlias = Answer | Ended
Send: TypeAlias = Callable[[Message], None]
