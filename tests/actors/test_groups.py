"""Groups of ranks over Ray: the traces of one engine in process, whatever happens to a rank or to its actor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from storage import TraceDataset
from storage.trace import Trace
from tests.actors.waiting import eventually

pytestmark = pytest.mark.usefixtures("cluster")
PROMPTS = ["12+34=", "7+8=", "99+1=", "5+5=", "31+14=", "80+9="]
OPTIONS = {"dtype": "float32", "max_running_requests": 4, "collective_timeout_s": 20}
SEEDED = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def alone() -> Iterator[RolloutClient]:
    """One engine in this process."""
    with RolloutClient.local(MODEL_PATH, **OPTIONS) as client:
        yield client


def check_same(found: list[Trace], expected: list[Trace]) -> None:
    assert [trace.sample_id for trace in found] == [trace.sample_id for trace in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.completion_ids == other.completion_ids
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_actors", "num_cpus", "dispatch"), [(1, 1, "alltoall"), (2, 0.5, "allgather")], ids=["group", "two groups"]
)
def test_a_group_over_ray_samples_what_one_engine_samples(alone, tmp_path, num_actors, num_cpus, dispatch):
    expected = alone.sample(PROMPTS, num_samples=4, sampling_params=SEEDED, step=num_actors)
    with RolloutClient.ray(
        MODEL_PATH,
        num_actors=num_actors,
        num_cpus=num_cpus,
        dp_size=2,
        moe_dispatch=dispatch,
        traces=tmp_path / "traces",
        **OPTIONS,
    ) as client:
        found = client.sample(PROMPTS, num_samples=4, sampling_params=SEEDED, step=num_actors)
        client.update_weights(MODEL_PATH, version=3)
        again = client.sample(PROMPTS[:1], sampling_params=SEEDED, step=5)
    check_same(found, expected)
    assert again[0].weight_version == 3


def ranks_of(actor: int) -> list[int]:
    """Pids of an actor's ranks, in their order."""
    children = Path(f"/proc/{actor}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return sorted(pid for pid in pids if "rollout.rank_process" in Path(f"/proc/{pid}/cmdline").read_text())


def runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.chaos
@pytest.mark.parametrize("victim", ["rank", "actor"])
def test_a_rank_or_the_whole_group_killed_in_mid_step_costs_no_sample(alone, tmp_path, victim):
    import ray

    long = SEEDED.model_copy(update={"max_tokens": 60})
    expected = alone.sample(PROMPTS, num_samples=4, sampling_params=long, step=10)
    with RolloutClient.ray(MODEL_PATH, num_cpus=1, dp_size=2, traces=tmp_path / "traces", **OPTIONS) as client:
        found: dict[str, Trace] = {}
        struck: list[int] = []
        for trace in client.stream(PROMPTS, num_samples=4, sampling_params=long, step=10):
            assert trace.sample_id not in found
            found[trace.sample_id] = trace
            if not struck:
                actor = ray.get(client.backend._slots[0].handle.health.remote())["pid"]
                struck = ranks_of(actor)
                assert len(struck) == 2
                os.kill(struck[1] if victim == "rank" else actor, signal.SIGKILL)
        actor_now = ray.get(client.backend._slots[0].handle.health.remote())["pid"]
        assert (actor_now == actor) == (victim == "rank")
        assert eventually(lambda: not any(runs(pid) for pid in struck))
        assert len(ranks_of(actor_now)) == 2
    check_same([found[trace.sample_id] for trace in expected], expected)
    assert sorted(trace.sample_id for trace in TraceDataset(tmp_path / "traces").iter(step=10)) == sorted(found)
