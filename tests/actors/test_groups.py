"""Groups of ranks over Ray: the traces of one engine in process, whatever happens to a rank or to its actor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from storage.trace import Trace

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
