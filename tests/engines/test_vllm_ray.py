"""Live vLLM inside a Ray actor: traces, an update, and an actor that was killed and replaced. See make_vllm_env.sh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollout import RolloutClient, SamplingParams
from storage import TraceDataset
from tests.engines.truth import OPTIONS, PROMPTS, WIDER, check, load

pytest.importorskip("vllm", reason="vLLM is not installed; see make_vllm_env.sh")
pytestmark = pytest.mark.peer
PARAMS = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)


def test_an_actor_takes_updates_and_one_in_its_place_has_them_too(checkpoint: Callable[..., Path], tmp_path: Path):
    import ray

    model = checkpoint("qwen3_moe", **WIDER)
    torch.manual_seed(1)
    other = load(model)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    environment = {"env_vars": {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}}
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="vllm-live")
    traces = tmp_path / "traces"
    try:
        with RolloutClient.ray(
            model, backend="vllm", num_actors=1, traces=traces, runtime_env=environment, **OPTIONS
        ) as client:
            check(client.sample(PROMPTS, sampling_params=PARAMS), load(model))
            client.update_weights(other.state_dict(), version=1)
            check(client.sample(PROMPTS, sampling_params=PARAMS), other)
            ray.kill(client.backend._slots[0].handle, no_restart=True)
            found = client.sample(PROMPTS, sampling_params=PARAMS)
            check(found, other)
            assert {trace.weight_version for trace in found} == {1}
        assert TraceDataset(traces).verify() == []
    finally:
        ray.shutdown()
