"""Tiny fp32 checkpoints of five MoE families, and one compute thread for every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.s3 import bucket, url

__all__ = ["bucket", "url"]

# A wide initialisation makes attention and routing decisive, so that a wrong mask or id changes tokens.
SHARED = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
FAMILIES = {
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="session", autouse=True)
def one_compute_thread() -> None:
    """In this process and those it starts; torch itself is only touched where a test has imported it."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint("mixtral", eos_token_id=7)`: a directory with seeded random weights, built once per arguments."""

    @cache
    def build(family: str, **overrides: Any) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        path = tmp_path_factory.mktemp(family)
        config = AutoConfig.for_model(family, **{**SHARED, **FAMILIES[family], **overrides})
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
        return path

    return build
