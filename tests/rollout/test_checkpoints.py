"""Checkpoints that are not what they seem: refused by name, and code of their own runs only when asked for."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import RolloutClient, SamplingParams
from rollout import attention as attention_module
from rollout.tiny_moe import MODEL_PATH
from tests.families import save_tiny

Checkpoint = Callable[..., Path]
SHORT = SamplingParams(max_tokens=3, temperature=0.0, seed=0)

REMOTE_CODE = """
from pathlib import Path
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
Path({marker!r}).write_text("ran")
class Config(Qwen3MoeConfig):
    pass
class Model(Qwen3MoeForCausalLM):
    config_class = Config
"""


def changed(source: Path, directory: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with another config."""
    target = directory / "model"
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def test_quantised_weights_are_refused_by_their_method(tmp_path: Path) -> None:
    path = changed(MODEL_PATH, tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ValueError, match=r"weights quantised with 'fp8'.*use a checkpoint in float32, bfloat16"):
        RolloutClient.local(path)


def test_a_config_with_more_layers_than_the_weights_is_refused(tmp_path: Path) -> None:
    path = changed(MODEL_PATH, tmp_path, num_hidden_layers=9)
    with pytest.raises(ValueError, match=r"weights such as 'model.layers.8.* are in no \*.safetensors file"):
        RolloutClient.local(path)


def test_a_layer_type_never_seen_before_is_refused_by_name(tmp_path: Path) -> None:
    source = save_tiny("gpt_oss", tmp_path / "source")
    kinds = json.loads((source / "config.json").read_text())["layer_types"]
    path = changed(source, tmp_path, layer_types=["telepathic_attention", *kinds[1:]])
    with pytest.raises(ValueError, match="telepathic_attention"):
        RolloutClient.local(path)


def remote(tmp_path: Path, model_type: str) -> tuple[Path, Path]:
    marker = tmp_path / "marker"
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    path = changed(MODEL_PATH, tmp_path, model_type=model_type, auto_map=auto_map)
    (path / "own.py").write_text(REMOTE_CODE.format(marker=str(marker)))
    return path, marker


def test_a_checkpoints_own_code_does_not_run(tmp_path: Path) -> None:
    path, marker = remote(tmp_path, "a_family_of_its_own")
    with pytest.raises(ValueError, match=r"a_family_of_its_own|trust_remote_code"):
        RolloutClient.local(path)
    assert not marker.exists()


def test_a_checkpoints_own_code_runs_when_asked_for_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    path, marker = remote(tmp_path, "qwen3_moe")
    with caplog.at_level(logging.WARNING, logger="rollout.loader"):
        with RolloutClient.local(path, dtype="float32", trust_remote_code=True) as client:
            (trace,) = client.sample(["1+2="], sampling_params=SHORT)
    assert (trace.text, marker.read_text()) == ("3", "ran")
    assert "may run its own code in this process" in caplog.text


def test_the_self_test_names_the_first_layer_that_differs(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong scale in the attention of layer 1 only, on the pool and in the model's own attention."""
    path = checkpoint("qwen3_moe", num_hidden_layers=4)
    attend = attention_module.slot_attention

    def wrong(module: Any, *args: Any, **keywords: Any) -> Any:
        out, weights = attend(module, *args, **keywords)
        return (out * 2 if module.layer_idx == 1 else out), weights

    monkeypatch.setattr(attention_module, "slot_attention", wrong)
    with caplog.at_level(logging.WARNING, logger="rollout"), RolloutClient.local(path, dtype="float32"):
        pass
    assert "first in model.layers.1 (Qwen3MoeDecoderLayer)" in caplog.text
    assert torch.get_default_dtype() is torch.float32
