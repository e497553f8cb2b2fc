"""What clients note in the run.json of the datasets they create."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from rollout import RolloutClient
from rollout.tiny_moe import MODEL_PATH
from tests.engines.fakes import FakeVllm


def test_a_local_client_notes_model_options_and_the_callers_configuration(tmp_path: Path) -> None:
    config = {"learning_rate": 1e-4, "wandb_api_key": "hunter2"}
    with RolloutClient.local(MODEL_PATH, traces=tmp_path, dtype="float32", run="a", run_config=config) as client:
        noted = json.loads((tmp_path / "run.json").read_text())
    assert (noted["run"], noted["model"]) == ("a", str(MODEL_PATH))
    assert noted["model_fingerprint"] == client.info.fingerprint
    assert (noted["engine"]["backend"], noted["engine"]["dtype"]) == ("moe-rollout", "float32")
    assert noted["engine"]["max_running_requests"] == 64  # not given: the default
    assert noted["config"] == {"learning_rate": 1e-4, "wandb_api_key": "not recorded"}
    assert noted["versions"]["torch"] == torch.__version__
    assert noted["versions"]["transformers"] == transformers.__version__


def test_a_client_of_a_server_notes_the_url_and_never_the_key(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    server, model = FakeVllm(), checkpoint("qwen3_moe")
    try:
        options = {"backend": "vllm", "model": model, "api_key": "hunter2", "traces": tmp_path / "traces"}
        RolloutClient.connect(server.url, **options).close()
    finally:
        server.stop()
    text = (tmp_path / "traces/run.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["url"] == server.url
    assert json.loads(text)["engine"]["backend"] == "vllm"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"run_config": [1, 2]}, r"run_config is \[1, 2\], need a mapping"),
        ({"on_stats": 3}, "on_stats is 3, need something to call"),
    ],
)
def test_what_the_client_cannot_use_is_refused_before_sampling(option: dict[str, object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        RolloutClient.local(MODEL_PATH, **option)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [0, -1, 1.5, "2"])
def test_num_sinks_is_an_integer_from_1(number: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"num_sinks is {number!r}, need an integer from 1")):
        RolloutClient.ray(MODEL_PATH, num_sinks=number)  # type: ignore[arg-type]
