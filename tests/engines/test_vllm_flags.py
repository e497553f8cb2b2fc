"""A vLLM server that lacks a flag is refused when a client connects, and the message says what to start it with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rollout import RolloutClient
from rollout.engine_reply import EngineDeadError
from tests.engines.fakes import FakeVllm


@pytest.fixture
def engine() -> str:
    return "vllm"


def connect(server: FakeVllm, model: Path, api: str = "generate") -> RolloutClient:
    return RolloutClient.connect(server.url, backend="vllm", model=model, api=api)


@pytest.mark.parametrize("api", ["generate", "completions"])
def test_logprobs_of_the_raw_distribution_are_refused(server, model, api):
    server.raw_logprobs = True
    with pytest.raises(
        ValueError, match=r"has logprob -0\.\d+, need 0; --logprobs-mode processed_logprobs .* Start it as"
    ):
        connect(server, model, api)


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("/inference/v1/generate", "--enable-scale-out"),
        ("/weight_info", "VLLM_SERVER_DEV_MODE=1"),
        ("/collective_rpc", "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_endpoints_that_a_flag_would_open_are_missed_at_once(server, model, path, flag):
    server.absent = {path}
    with pytest.raises(ValueError, match=f"cannot serve model .*{path}: 404: Not Found.* Start it as: .*{flag}"):
        connect(server, model)


def test_workers_that_cannot_load_weights_are_refused_before_the_first_update(server, model):
    server.extended = False
    with pytest.raises(
        ValueError, match=r"--worker-extension-cls .* is missing: .*500: .* Start it as: .*LoadExtension"
    ):
        connect(server, model)
    assert not server.paused


def test_an_update_that_fails_leaves_the_server_condemned_and_not_paused(server, model, tmp_path):
    newer = shutil.copytree(model, tmp_path / "newer")
    with connect(server, model) as client:
        server.fail_update = True
        with pytest.raises(EngineDeadError, match="500: Call to collective_rpc method failed"):
            client.update_weights(newer, version=1)
    assert not server.paused
    assert server.version == "broken by a failed update"
    paths = [path for path, *_ in server.seen]
    assert paths.index("/update_weight_version") < paths.index("/resume")
