"""How a served engine is spoken to: what every adapter gives to `ServedBackend`, and the names of requests there."""

from __future__ import annotations

import uuid
from typing import Any, Protocol

from rollout.backend import SampleRequest
from rollout.capabilities import Capabilities
from rollout.engine_model import EngineModel
from rollout.engine_reply import EngineReply


class EngineAdapter(Protocol):
    """One way to speak to one engine. All methods run on one event loop.

    Attributes:
        takes_state_dicts: weights may be state dicts; otherwise they are directories that the engine reads.
        owned: `open` starts the engine and may start it again; otherwise it connects to one that others start.
    """

    model: EngineModel
    takes_state_dicts: bool
    owned: bool

    @property
    def capabilities(self) -> Capabilities:
        """Known once `open` has returned."""

    @property
    def own_weights(self) -> str:
        """Where the engine itself finds the weights that it was started with: a directory or hub id, as it names it."""

    @property
    def max_sequence_tokens(self) -> int:
        """The engine's own bound of prompt + completion."""

    async def open(self) -> int:
        """Connect or start, check what can be checked; the current weight version. Called again after a death.

        Raises:
            EngineError, ValueError: it cannot be used; the message says what to start it with.
        """

    @property
    def progress(self) -> int | None:
        """Grows while the engine computes; from any thread. None when it does not say: each answer has a time limit."""

    async def weight_version(self) -> int:
        """The version that the engine says it has now."""

    async def generate(self, request: SampleRequest, request_id: str) -> EngineReply:
        """Sample one sequence.

        Raises:
            EngineDeadError: the engine, or the connection to it, is gone.
            EngineError, ValueError: this request failed.
        """

    async def abort(self, request_id: str) -> None:
        """End it early: `generate` then returns what there is."""

    async def load_weights(self, source: Any, version: int, *, running: bool = False) -> None:
        """Load, drop every cached key and value, set the version. An error means: not usable.

        Args:
            running: requests are under way and go on, their keys and values computed again, and their replies name
                both versions; only with `Capabilities.update_in_flight`. Otherwise nothing is running.
        """

    async def condemn(self) -> None:
        """After a failed update: see to it that `open` refuses this engine until it was started again."""

    async def close(self) -> None:
        """Release it."""


def new_request_id() -> str:
    """Unique among a server's clients and of fixed width: SGLang aborts every id that begins with the given one."""
    return f"rx-{uuid.uuid4().hex}"
