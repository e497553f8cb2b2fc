"""Random models of a known shape for benchmarks; the figures in the README name them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig


def make_small(directory: Path) -> str:
    """Qwen3-MoE, 29 M parameters: hidden 256, 8 layers, 32 experts top-4 of width 128, vocabulary 4096, float32."""
    path = directory / "small"
    if not path.exists():
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            num_experts=32,
            num_experts_per_tok=4,
            max_position_embeddings=4096,
            eos_token_id=0,
            pad_token_id=1,
        )
        AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return str(path)
