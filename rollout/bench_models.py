"""Random models of known shapes for `moe-rollout bench`; the figures in the README name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "num_attention_heads": 8,
    },
    "mid": {
        "hidden_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
    },
}
"""Qwen3-MoE with 8 layers and a vocabulary of 4096: 29 M and 835 M parameters."""

COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
DTYPES = {"small": torch.float32, "mid": torch.bfloat16}


def save_model(name: str, directory: Path) -> str:
    """Save one of SHAPES with seeded random weights in its dtype of DTYPES, once, and return its directory."""
    path = directory / name
    if not path.exists():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(**COMMON, **SHAPES[name])
        AutoModelForCausalLM.from_config(config, dtype=DTYPES[name]).save_pretrained(path)
    return str(path)
