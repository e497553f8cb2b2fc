"""SGLang's offline Engine, which needs a GPU: a module with the calls of SGLang 0.5.23 that are used stands for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.engine_reply import EngineDeadError
from rollout.rng import stream_key
from storage import TraceDataset
from tests.engines.fake_sglang import SHAPE, Engine
from tests.engines.fakes import Drawn

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    names = ("sglang", "sglang.srt", "sglang.srt.managers", "sglang.srt.managers.io_struct")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    Engine.made = []
    vars(modules["sglang"]).update(__version__="0.5.23", Engine=Engine)
    vars(modules["sglang.srt.managers.io_struct"]).update(UpdateWeightFromDiskReqInput=SimpleNamespace)
    return Engine


@pytest.fixture
def client(sglang: type[Engine], model: Path, tmp_path: Path) -> Iterator[RolloutClient]:
    options = {"dtype": "float32", "enable_deterministic_inference": True}
    with RolloutClient.local(model, backend="sglang", traces=tmp_path / "traces", **options) as client:
        yield client
    assert all(engine.down for engine in sglang.made)


def assert_drawn(traces: list, weights: str, version: int) -> None:
    for trace in traces:
        seed = stream_key(3, trace.sample_id) & (2**31 - 1)
        drawn = Drawn(trace.prompt_ids, 4, seed, weights, SHAPE)
        assert trace.error is None
        assert trace.completion_ids == drawn.ids
        assert trace.routed_experts.tolist() == drawn.routes.tolist()
        assert trace.weight_version == version


def test_its_progress_is_the_time_of_the_last_message(client, sglang):
    sglang.made[0].tokenizer_manager.last_receive_tstamp = 1_796_040_000.25
    assert client.backend.progress == 1_796_040_000_250


def test_it_is_started_with_capture_and_its_traces_are_those_of_the_contract(client, sglang, model, tmp_path):
    assert [engine.kwargs for engine in sglang.made] == [
        {
            "model_path": str(model),
            "enable_return_routed_experts": True,
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "dtype": "float32",
            "enable_deterministic_inference": True,
        }
    ]
    assert client.info.max_sequence_tokens == 200
    traces = client.sample([[5, 7, 9], [6, 7]], num_samples=2, sampling_params=PARAMS)
    assert_drawn(traces, "1.0", 0)
    dataset = TraceDataset(tmp_path / "traces")
    assert (dataset.verify(), dataset.frozen_recompute, dataset.slot_order) == ([], False, "unmeasured")
    assert len(dataset) == 4


def test_state_dicts_and_directories_reach_its_schedulers(client, sglang, model, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(model)
    other.model.norm.weight.data[0] = 2.0
    client.update_weights(other.state_dict(), version=1)
    assert_drawn(client.sample([[5, 7]], sampling_params=PARAMS), "2.0", 1)
    other.model.norm.weight.data[0] = 3.0
    other.save_pretrained(tmp_path / "other")
    client.update_weights(tmp_path / "other", version=2)
    assert_drawn(client.sample([[5, 7]], sampling_params=PARAMS), "3.0", 2)


def test_after_a_refused_update_or_a_crash_another_engine_is_started(client, sglang, model):
    sglang.made[0].refuse = True
    with pytest.raises(EngineDeadError, match=r"did not load .*: shape mismatch; it is started again"):
        client.update_weights(model, version=1)
    assert_drawn(client.sample([[5, 7]], sampling_params=PARAMS), "1.0", 0)
    assert [engine.down for engine in sglang.made] == [True, False]
    sglang.made[1].dead = True
    (failed,) = client.sample([[5, 7]], sampling_params=PARAMS)
    assert "SGLang's engine failed: RuntimeError: the scheduler died" in failed.error
    assert_drawn(client.sample([[5, 7]], sampling_params=PARAMS), "1.0", 0)
    assert [engine.down for engine in sglang.made] == [True, True, False]


def test_an_abort_ends_requests_with_the_rows_they_have(client, sglang):
    sglang.made[0].hold = True
    requests = client._requests.check([[5, 7, 9]] * 3, 1, PARAMS).requests(0, 0)
    stream = client.backend.stream(requests)
    client.backend.start(requests[0], stream._outbox)
    while not client.backend._running:
        pass
    client.abort([requests[0].sample_id])
    trace = stream._outbox.get(timeout=60)
    assert (trace.finish_reason, trace.routed_experts.shape) == ("abort", (3 + 3 - 1, 2, 2))
    assert trace.routed_experts.dtype == np.uint8


def test_seeds_are_refused_where_its_sampler_would_ignore_them(sglang, model):
    with RolloutClient.local(model, backend="sglang") as client:
        with pytest.raises(ValueError, match=r"SGLang 0\.5\.23 cannot do seed=3: .*--enable-deterministic-inference"):
            client.sample([[5, 7]], sampling_params=PARAMS)


def test_an_old_release_is_refused(sglang, model):
    sys.modules["sglang"].__version__ = "0.4.9"
    with pytest.raises(ValueError, match=r"SGLang 0\.4\.9 is too old for recorded routes"):
        RolloutClient.local(model, backend="sglang")
