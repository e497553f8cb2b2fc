"""What a client of a fake server must return, and how an answer of either engine is changed."""

from __future__ import annotations

import base64

import numpy as np

from rollout import RolloutClient, SamplingParams
from rollout.rng import stream_key
from tests.engines.fakes import Drawn, FakeServer, FakeSglang

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
PROMPTS = [[5, 7, 9], [6, 7]]


def expected(trace, server: FakeServer, weights: str = "start") -> Drawn:
    """The fake model's own answer, from the seed that belongs to this sample."""
    bits = 31 if isinstance(server, FakeSglang) else 63
    seed = stream_key(trace.seed, trace.sample_id) & (2**bits - 1)
    return Drawn(trace.prompt_ids, len(trace.completion_ids), seed, weights, server.shape)


def assert_faithful(trace, server: FakeServer, weights: str = "start") -> None:
    drawn = expected(trace, server, weights)
    assert trace.completion_ids == drawn.ids
    assert trace.logprobs.tolist() == drawn.logprobs.tolist()
    assert trace.routed_experts.dtype == np.uint8
    assert trace.routed_experts.tolist() == drawn.routes.tolist()


def requests_of(client: RolloutClient, count: int, key: str = "p"):
    prompts = [[5, 7, 9]] * count
    keys = [f"{key}{i}" for i in range(count)]
    return client._requests.check(prompts, 1, PARAMS, keys).requests(0, 0)


def spoilt(body, change):
    """`change(routes bytes) -> bytes` applied to the routes of a reply of either engine."""
    holder = body["meta_info"] if "meta_info" in body else body["choices"][0]
    holder["routed_experts"] = change(holder["routed_experts"])
    return body


def on_bytes(change):
    return lambda text: base64.b64encode(change(base64.b64decode(text))).decode()


def missing(body):
    holder = body["meta_info"] if "meta_info" in body else body["choices"][0]
    del holder["routed_experts"]
    return body
