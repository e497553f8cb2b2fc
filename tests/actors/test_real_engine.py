"""The packaged model over Ray: the same traces as in process, bit for bit, whatever happens to the actors."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from actors.pool import ActorPool, Limits
from rollout.backend import Backend, SampleRequest
from rollout.sampling import SamplingParams
from storage.trace import Trace
from tests.actors.waiting import eventually

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "rollout" / "tiny_moe")
OPTIONS = {"dtype": "float32", "batch_invariant": True, "max_running_requests": 8}


def requests_of(count: int, max_tokens: int = 6, **params: object) -> list[SampleRequest]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, **params)  # type: ignore[arg-type]
    return [SampleRequest(f"run/0/{i}/0", 0, tuple(range(3, 5 + i % 4)), sampling) for i in range(count)]


def collect(backend: Backend, requests: list[SampleRequest]) -> dict[str, Trace]:
    traces = [trace for finished in backend.stream(requests) for trace in finished.traces()]
    assert len(traces) == len(requests)
    return {trace.sample_id: trace for trace in traces}


def assert_identical(left: dict[str, Trace], right: dict[str, Trace]) -> None:
    assert left.keys() == right.keys()
    for sample_id, trace in left.items():
        assert trace.token_ids == right[sample_id].token_ids
        np.testing.assert_array_equal(trace.logprobs, right[sample_id].logprobs)
        np.testing.assert_array_equal(trace.routed_experts, right[sample_id].routed_experts)


@pytest.fixture(scope="module")
def in_process() -> Iterator[Backend]:
    from rollout.local_backend import LocalBackend

    backend = LocalBackend(MODEL, **OPTIONS)
    yield backend
    backend.close()


@pytest.mark.full
def test_closing_a_generator_stops_the_engine_before_its_requests_end() -> None:
    from actors.generator import Generator

    generator = Generator(MODEL, OPTIONS)
    generator.load()
    engine = generator._backend._built.engine  # type: ignore[union-attr]
    (short,), long = requests_of(1, max_tokens=1), requests_of(5, max_tokens=100)[1:]
    tables = generator.generate([short, *long])
    assert next(tables)["sample_id"].to_pylist() == [short.sample_id]
    tables.close()
    assert eventually(lambda: engine.idle)
    assert engine.stats.sampled_tokens < 4 * 100
    generator.close()


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
def test_keep_gives_version_spans_and_sleep_changes_nothing_over_ray() -> None:
    from transformers import AutoModelForCausalLM

    from rollout import RolloutClient

    state = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").state_dict()
    params = SamplingParams(max_tokens=100, seed=3, ignore_eos=True)
    with RolloutClient.ray(MODEL, num_actors=1, **OPTIONS) as client:
        stream = client.stream([[4, 5, 13]] * 24, sampling_params=params, step=0)
        traces = [next(stream)]
        client.update_weights(state, version=1, in_flight="keep")
        traces += stream
        spans = [[span.version for span in trace.weight_versions] for trace in traces]
        assert [0, 1] in spans
        assert all(span in ([0], [0, 1], [1]) for span in spans)
        greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        (before,) = client.sample([[4, 5, 13]], sampling_params=greedy, step=1)
        client.sleep()
        client.wake()
        (after,) = client.sample([[4, 5, 13]], sampling_params=greedy, step=2)
        assert (after.token_ids, after.weight_version) == (before.token_ids, 1)
        np.testing.assert_array_equal(after.routed_experts, before.routed_experts)


@pytest.mark.chaos
@pytest.mark.usefixtures("cluster")
def test_actors_killed_at_random_lose_and_double_nothing(in_process: Backend) -> None:
    import ray

    requests, chance = requests_of(200), random.Random(0)
    limits = Limits(chunk_samples=4, outstanding_chunks=3, max_attempts=8)
    pool = ActorPool(MODEL, num_actors=2, engine_options=OPTIONS, limits=limits)
    traces: list[Trace] = []
    killed: set[int] = set()
    for finished in pool.stream(requests):
        traces += finished.traces()
        slot = chance.choice(pool._slots)
        handle = slot.ready_handle()
        if len(traces) >= 30 * (len(killed) + 1) and len(killed) < 4 and handle is not None:
            pid = ray.get(handle.health.remote())["pid"]
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    assert len(killed) == 4
    assert len(traces) == 200
    assert_identical({trace.sample_id: trace for trace in traces}, collect(in_process, requests))
    pool.close()
