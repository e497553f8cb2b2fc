"""SGLang's offline Engine in Ray actors: a package in its place, see tests/engines/fake_sglang.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.rng import stream_key
from storage import TraceDataset
from tests.actors.conftest import ROOT
from tests.engines.fake_sglang import SHAPE, install
from tests.engines.fakes import Drawn

pytestmark = pytest.mark.full
PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


def assert_drawn(traces: list, weights: str, version: int) -> None:
    assert len(traces) == 6
    for trace in traces:
        drawn = Drawn(trace.prompt_ids, 4, stream_key(3, trace.sample_id) & (2**31 - 1), weights, SHAPE)
        assert trace.error is None
        assert trace.completion_ids == drawn.ids
        assert trace.routed_experts.tolist() == drawn.routes.tolist()
        assert trace.weight_version == version


def test_actors_sample_take_updates_and_one_in_place_of_another_has_them(
    cluster: None, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    import ray

    model = checkpoint("qwen3_moe")
    install(tmp_path / "path")
    options = {"backend": "sglang", "dtype": "float32", "enable_deterministic_inference": True}
    environment = {"env_vars": {"PYTHONPATH": f"{tmp_path / 'path'}:{ROOT}"}}
    other = AutoModelForCausalLM.from_pretrained(model)
    other.model.norm.weight.data[0] = 2.0
    prompts = [[5, 7, 9], [6, 7], [8]]
    with RolloutClient.ray(
        model, num_actors=2, num_cpus=0.5, traces=tmp_path / "traces", runtime_env=environment, **options
    ) as client:
        assert client.info.capabilities.engine == "SGLang 0.5.23"
        assert_drawn(client.sample(prompts, num_samples=2, sampling_params=PARAMS), "1.0", 0)
        client.update_weights(other.state_dict(), version=1)
        assert_drawn(client.sample(prompts, num_samples=2, sampling_params=PARAMS), "2.0", 1)
        for slot in client.backend._slots:
            ray.kill(slot.handle, no_restart=True)
        assert_drawn(client.sample(prompts, num_samples=2, sampling_params=PARAMS), "2.0", 1)
    dataset = TraceDataset(tmp_path / "traces")
    assert (dataset.verify(), dataset.frozen_recompute, dataset.slot_order) == ([], False, "unmeasured")
    assert len(dataset) == 18
