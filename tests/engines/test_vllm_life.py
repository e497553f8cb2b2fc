"""Live vLLM 0.30 on the CPU: updates of what is under way, crashes, and what comes back. See make_vllm_env.sh."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import RolloutClient, SamplingParams
from rollout.engine_reply import EngineDeadError
from tests.engines.truth import OPTIONS, PROMPTS, WIDER, check, load
from tests.engines.vllm_server import KEY, VllmServer

pytest.importorskip("vllm", reason="vLLM is not installed; see make_vllm_env.sh")
pytestmark = pytest.mark.peer
PARAMS = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_moe", **WIDER)


@pytest.fixture(scope="module")
def other(model: Path) -> Any:
    """The same model with other weights."""
    torch.manual_seed(1)
    other = load(model)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return other


@pytest.fixture(scope="module")
def saved(other: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other")
    other.save_pretrained(path)
    return path


@pytest.fixture
def client(model: Path) -> Iterator[RolloutClient]:
    with RolloutClient.local(model, backend="vllm", **OPTIONS) as client:
        yield client


def test_an_update_in_mid_flight_marks_which_rows_and_tokens_are_whose(client, model, other):
    """Some prompts of the second wave are cut, waiting or not sampled from yet when the weights change."""
    plain = load(model)
    client.update_weights(model, version=1)
    params = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    traces: list = []
    prompts = PROMPTS * 6  # 24 sequences, of which 16 run at once
    thread = threading.Thread(target=lambda: traces.extend(client.sample(prompts, sampling_params=params)))
    thread.start()
    while len(client.backend._running) < len(prompts):
        thread.join(0.01)
    for version in (2, 3):
        thread.join(0.3)
        client.update_weights(
            (other if version == 2 else plain).state_dict(), version, in_flight="keep", kv="recompute"
        )
    thread.join(120)
    check(traces, {1: plain, 2: other, 3: plain})
    assert {3} < {span.version for trace in traces for span in trace.weight_versions}
    assert any(len(trace.weight_versions) > 1 for trace in traces)


def test_an_engine_that_crashed_is_started_again_with_the_weights_of_the_last_update(client, other, saved):
    client.update_weights(saved, version=1)
    crash(client)
    traces = client.sample(PROMPTS, sampling_params=PARAMS)
    check(traces, other)
    assert {trace.weight_version for trace in traces} == {1}


def test_a_crash_fails_all_that_is_under_way_and_hangs_nobody(client):
    crash(client, prompts=PROMPTS * 8)


def test_closing_while_another_engine_is_started_leaves_room_for_the_next_client(model):
    with RolloutClient.local(model, backend="vllm", **OPTIONS) as client:
        crash(client)
        client.sample(PROMPTS[:1], sampling_params=PARAMS)  # its engine runs again, so that it can be broken
        crash(client, all_of_them=False)
    with RolloutClient.local(model, backend="vllm", **OPTIONS) as client:
        check(client.sample(PROMPTS, sampling_params=PARAMS), load(model))


def crash(client: RolloutClient, prompts: list = PROMPTS, all_of_them: bool = True) -> None:
    """A step fails under the first of these prompts; those that begin later find another engine."""

    def fail() -> None:
        raise RuntimeError("boom")

    client.backend._adapter._engine.step = fail
    requests = client._requests.check(prompts, 1, PARAMS).requests(0, 0)
    stream = client.backend.stream(requests)
    if not all_of_them:
        assert "boom" in next(stream).trace.error
        return
    traces = [item.trace for item in stream]
    assert len(traces) == len(prompts)
    failed = [trace.error for trace in traces if trace.finish_reason == "error"]
    assert failed
    assert all("boom" in error for error in failed)


def test_an_update_that_failed_half_way_leaves_an_engine_that_is_started_again(client, model, saved, tmp_path):
    """The file is right where it is checked and gone when the worker reads it."""
    broken = Path(shutil.copytree(saved, tmp_path / "broken"))
    with client.backend.prepare_update(broken, 1) as apply:
        (weights,) = broken.glob("*.safetensors")
        weights.write_bytes(weights.read_bytes()[:5000])
        with pytest.raises(EngineDeadError, match=r"version 1 failed.*started again when it is asked next"):
            apply("wait", "keep")
    traces = client.sample(PROMPTS, sampling_params=PARAMS)
    check(traces, load(model))
    assert {trace.weight_version for trace in traces} == {0}


def test_a_server_that_was_killed_fails_what_it_held_and_comes_back_with_its_weights(model, other, saved, tmp_path):
    options = {name: value for name, value in OPTIONS.items() if name != "enforce_eager"}
    server = VllmServer(model, tmp_path / "log", **options)
    with RolloutClient.connect(server.url, backend="vllm", model=model, api_key=KEY) as client:
        client.update_weights(saved, version=3)
        params = SamplingParams(max_tokens=190, seed=1, ignore_eos=True)
        held: list = []
        thread = threading.Thread(target=lambda: held.extend(client.sample([PROMPTS[1]] * 64, sampling_params=params)))
        thread.start()
        while not client.backend._running:  # a quick server has never all of them at once
            thread.join(0.01)
        server.kill()
        thread.join(60)
        assert "error" in {trace.finish_reason for trace in held}
        assert len(held) == 64
        with pytest.raises(EngineDeadError, match="cannot connect"):
            client.sample(PROMPTS, sampling_params=PARAMS)
        server.start()
        traces = client.sample(PROMPTS, sampling_params=PARAMS)
        check(traces, other)
        assert {trace.weight_version for trace in traces} == {3}
    server.kill()
