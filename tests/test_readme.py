"""The README's Python runs as it is written, one block after the other, in an empty directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.tiny_moe import MODEL_PATH

README = (Path(__file__).parent.parent / "README.md").read_text()
SAMPLE, REPLAY, READ = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the first block defines; the later ones start from there."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("readme"))
        exec(SAMPLE, found)
        yield found


def test_sampling_gives_the_values_in_the_comments(names: dict[str, Any]) -> None:
    trace = names["t"]
    text, reason, shape = re.search(r"# \('(.*?)', '(.*?)'\)[\s\S]*?# \((\d+, \d+, \d+)\)", SAMPLE).groups()  # type: ignore[union-attr]
    assert (trace.text, trace.finish_reason) == (text, reason)
    assert trace.routed_experts.shape == tuple(int(n) for n in shape.split(", "))


def test_replaying_gives_gradients(names: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    assert "advantages = ..." in REPLAY
    exec(REPLAY.replace("advantages = ...", "advantages = torch.ones(8)"), names | {"model": model, "torch": torch})
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "mlp.gate" in n)


def test_reading_the_dataset(names: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    exec(READ, names)
    assert "step" in capfd.readouterr().out
