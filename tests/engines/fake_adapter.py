"""An engine that the client owns, without a model: it can die, lose its weights and be started again."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from rollout.capabilities import Capabilities
from rollout.engine_model import EngineModel
from rollout.engine_reply import EngineDeadError, EngineError, EngineReply
from tests.engines.fakes import Drawn


class OwnedEngine:
    """An EngineAdapter whose answers are `Drawn` from prompt, seed and weights.

    Attributes:
        starts: how often it was started.
        dead: every request fails until it is started again; with `hopeless` it cannot be.
        fail_update: loading breaks it.
        progress: answers given; see EngineAdapter.
        updates: (weights, version, running) of every load.
    """

    takes_state_dicts = owned = True
    shape = (2, 2, 8, 96)

    def __init__(self, model: EngineModel) -> None:
        self.model, self.own_weights, self.max_sequence_tokens = model, "its own", 256
        self.capabilities = Capabilities(engine="Fake 1.0", frozen_recompute=False)
        self.starts, self.version, self.weights = 0, 0, "start"
        self.generating = self.progress = 0
        self.start_seconds, self.opening, self.opened = 0.01, threading.Event(), False
        self.dead = self.hopeless = self.fail_update = False
        self.updates: list[tuple[Any, int, bool]] = []

    async def open(self) -> int:
        self.opening.set()
        await asyncio.sleep(self.start_seconds)
        if self.hopeless:
            raise EngineError("out of memory")
        self.starts += 1
        self.opened = True
        self.version, self.weights, self.dead = 0, "start", False
        return 0

    async def weight_version(self) -> int:
        return self.version

    async def generate(self, request: Any, request_id: str) -> EngineReply:
        self.generating += 1
        await asyncio.sleep(0.005)
        self.generating -= 1
        if self.dead:
            raise EngineDeadError("its thread has ended")
        self.progress += 1
        count = request.sampling_params.max_tokens
        drawn = Drawn(list(request.prompt_ids), count, request.seed, self.weights, self.shape)
        return EngineReply(drawn.ids, drawn.ids, drawn.logprobs.tolist(), drawn.routes, "length")

    async def abort(self, request_id: str) -> None:
        pass

    async def load_weights(self, source: Any, version: int, *, running: bool = False) -> None:
        self.updates.append((source, version, running))
        await asyncio.sleep(0.01)
        assert running or not self.generating, "weights changed under a request"
        if self.fail_update:
            self.dead = True
            raise RuntimeError("shape mismatch")
        self.version = version
        self.weights = (
            "start"
            if str(source) in (self.model.path, self.own_weights)
            else "dict"
            if isinstance(source, dict)
            else str(source)
        )

    async def condemn(self) -> None:
        pass

    async def close(self) -> None:
        self.opened = False
