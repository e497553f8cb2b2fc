"""What loading a rank takes: its own part of the experts, at the peak too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.full
MIB = 2**20
LOAD = """
import json, re, sys
import torch
from rollout.sharded_loader import load_rank

def peak():  # resource.getrusage would begin with that of the process that forked this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

load_rank(sys.argv[1], torch.float32, 0, 2)
before = peak()
model = load_rank(sys.argv[2], torch.float32, 0, int(sys.argv[3]))
experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
print(json.dumps({"peak": peak() - before, "experts": experts, "all": sum(p.nbytes for p in model.parameters())}))
"""


def save(path: Path, width: int) -> Path:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=width,
    )
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return path


def loaded(small: Path, large: Path, size: int) -> dict[str, int]:
    """By a process of its own, which has loaded a small model before, so that torch and transformers are there."""
    command = [sys.executable, "-c", LOAD, str(small), str(large), str(size)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def test_a_rank_takes_memory_for_its_own_experts_only(tmp_path: Path) -> None:
    small, large = save(tmp_path / "small", 8), save(tmp_path / "large", 2048)
    experts = 2 * 16 * 3 * 256 * 2048 * 4
    whole, quarter = loaded(small, large, 1), loaded(small, large, 4)
    assert (whole["experts"], quarter["experts"]) == (experts, experts // 4)
    assert whole["peak"] > 2 * experts, (whole, quarter)  # as read from the file, and in the model
    assert quarter["peak"] < 2 * quarter["all"] + 32 * MIB, (whole, quarter)
    assert quarter["peak"] < 0.3 * whole["peak"], (whole, quarter)
