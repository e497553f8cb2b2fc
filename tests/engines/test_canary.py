"""The first update is a rehearsal, and nothing but the reload can make its answers differ."""

from __future__ import annotations

import queue
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rollout import SamplingParams
from rollout.backend import SampleRequest
from rollout.canary import Song, difference
from rollout.engine_model import describe_model
from rollout.served_engine import ServedBackend
from tests.engines.fake_adapter import OwnedEngine


class Cached(OwnedEngine):
    """As bfloat16 on a GPU: routes of a prompt may differ when its keys come from the cache, or others run beside."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.cache: set = set()

    async def generate(self, request, request_id):
        beside = self.generating > 0
        reply = await super().generate(request, request_id)
        if request.prompt_ids in self.cache or beside:
            reply.layers[0] = reply.layers[0, :, ::-1]
        self.cache.add(request.prompt_ids)
        return reply

    async def load_weights(self, source, version, *, running=False) -> None:
        await super().load_weights(source, version, running=running)
        self.cache.clear()


@pytest.fixture
def cached(model: Path) -> Cached:
    return Cached(describe_model(str(model)))


def test_its_prompts_are_in_no_cache(connect, server, model):
    """Each is asked once before the reload and once behind it, which drops the cache; never by two clients."""
    for version in (1, 2):
        connect().update_weights(model, version)
    bodies = [body for path, body, _ in server.seen if path in server.generated and is_greedy(body)]
    times = Counter(str(body.get("token_ids") or body.get("prompt") or body.get("input_ids")) for body in bodies)
    assert sorted(times.values()) == [1] * 6 + [2] * 6  # two connect, two rehearse


def is_greedy(body: dict) -> bool:
    return (body.get("sampling_params") or body)["temperature"] == 0


def test_it_sings_alone_also_when_the_update_keeps_what_runs(cached, model):
    backend = ServedBackend(cached)
    outbox: queue.SimpleQueue = queue.SimpleQueue()
    params = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    requests = [SampleRequest(f"run/0/{i}/0", 0, (5, i), params) for i in range(40)]
    for request in requests:
        backend.start(request, outbox)
    backend.update_weights(model, 1, in_flight="keep", kv="recompute")
    traces = [outbox.get(timeout=60) for _ in requests]
    backend.close()
    assert {trace.error for trace in traces} == {None}


def test_what_differs_is_told():
    song = Song([7, 9], np.zeros((4, 1, 2), np.uint8))
    other = np.zeros((4, 1, 2), np.uint8)
    other[1] = 1
    assert difference([song], [song]) is None
    assert difference([song, song], [song, Song([7, 8], song.layers)]) == (
        "greedy tokens of canary 1 were [7, 9] and are [7, 8]"
    )
    assert difference([song], [song._replace(layers=other)]) == "25.0% of the routes of canary 0 changed"
