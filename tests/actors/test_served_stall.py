"""An engine that is not ours, in an actor: when it hangs, the actor is replaced; when it only takes long, it is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.pool import ActorPool, Limits
from rollout.backend import SampleRequest
from rollout.engine_model import EngineModel, describe_model
from rollout.engine_reply import EngineReply
from rollout.sampling import SamplingParams
from rollout.served_engine import ServedBackend
from tests.engines.fake_adapter import OwnedEngine

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("cluster")]
QUICK = Limits(chunk_samples=2, outstanding_chunks=2, stall_seconds=6.0)  # longer than a busy machine takes
HANGS, SLOW = "run/0/2/0", "run/0/1/0"
REQUESTS = [SampleRequest(f"run/0/{i}/0", 0, (5, i), SamplingParams(max_tokens=4, seed=3)) for i in range(6)]


class Hanging(OwnedEngine):
    """Stands still at one sample, the first time; another takes longer than a stall, but goes on."""

    def __init__(self, model: EngineModel, journal: Path) -> None:
        super().__init__(model)
        self._journal = journal

    async def generate(self, request: Any, request_id: str) -> EngineReply:
        if request.sample_id == HANGS and not (self._journal / "hung").exists():
            (self._journal / "hung").touch()
            await asyncio.Event().wait()
        for _ in range(80 if request.sample_id == SLOW else 0):
            await asyncio.sleep(0.1)
            self.progress += 1
        return await super().generate(request, request_id)


def hanging_backend(model: str, *, journal: str) -> ServedBackend:
    return ServedBackend(Hanging(describe_model(model), Path(journal)))


def test_a_hanging_engine_is_replaced_and_a_slow_one_is_not(checkpoint, journal: Path, caplog) -> None:
    options = {"journal": str(journal)}
    pool = ActorPool(
        checkpoint("qwen3_moe"),
        num_cpus=0.5,
        engine_options=options,
        backend_factory=hanging_backend,
        limits=QUICK,
    )
    traces = [trace for finished in pool.stream(REQUESTS) for trace in finished.traces()]
    pool.close()
    assert (journal / "hung").exists()
    assert sorted(trace.sample_id for trace in traces) == [request.sample_id for request in REQUESTS]
    assert [trace.error for trace in traces] == [None] * 6
    assert caplog.text.count("made no token for") == 1
