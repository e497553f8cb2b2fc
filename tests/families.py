"""Tiny random models of every MoE family that the installed transformers can generate with.

The list is what transformers itself declares. Sizes are small and equal where a config has the field; windows and
chunks are 16 tokens, so that prompts exceed them; each kind of layer that a family has appears at least once. A wide
initialisation, with noise on norms, sinks and selection biases, makes attention and routing decide the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

VOCAB = 128
MAX_POSITIONS = 256
WINDOW = 16
LAYERS = 4
SPREAD = 0.2

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": LAYERS,
    "num_layers": LAYERS // 2,  # of two attention blocks each (longcat)
    "max_position_embeddings": MAX_POSITIONS,
    "model_max_length": MAX_POSITIONS,
    "initializer_range": SPREAD,
    # attention
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_multiplier": 0.25,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "kv_channels": 16,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": LAYERS,
    "attention_chunk_size": WINDOW,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "d_rel": 8,
    "rel_extent": 32,
    "index_n_heads": 32,  # scores of few heads tie at exactly 0, and the order of ties depends on the length
    "index_head_dim": 16,
    "index_topk": 8,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "zero_expert_num": 2,
    "n_group": 4,
    "num_expert_group": 4,
    "topk_group": 2,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "router_hidden_size": 16,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    # state-space, convolution and linear layers
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_dt_rank": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "block_size": 8,
    "use_mamba_kernels": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What a family needs beside SIZES: its shapes depend on each other, or its default lacks what makes it special.
OVERRIDES: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": MAX_POSITIONS,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 8, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}},
    },
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "gemma4_text": {"enable_moe_block": True},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 1, "floor_scale": 4},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "time_step_min": 1e-9,  # prompts are computed with time steps raised to it, single tokens are not
    },
    "phimoe": {"sliding_window": None},  # its released checkpoint has none either; tested with one of its own
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}

# The other towers of multimodal families. Only text is generated: they have to exist in the checkpoint, and be small.
_VIT = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TOWERS: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "vision_config": {**_TOWER, "adapter_in_dim": 32, "adapter_out_dim": 64, "mlp_layer_types": ["dense"]},
        "audio_config": {**_TOWER, "adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    },
    "gemma4": {"vision_config": _TOWER, "audio_config": None},
    "llama4": {
        "vision_config": {
            **_TOWER,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        }
    },
    "qwen3_5_moe": {"vision_config": _VIT},
    "qwen4_exp": {"vision_config": _VIT},
}

# Families that AutoModelForCausalLM lists and that cannot be built small and random, with the reason.
NOT_BUILDABLE: dict[str, str] = {}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """The family's config with SIZES where it has the field, OVERRIDES, and one layer of each kind."""
    make = CONFIG_MAPPING[model_type]
    default = make()
    if "text_config" in make.sub_configs:
        text = tiny_config(default.text_config.model_type, **overrides)
        return make(text_config=text.to_dict(), **TOWERS.get(model_type, {}))
    fields = default.to_dict()
    chosen = {name: value for name, value in SIZES.items() if name in fields}
    chosen.update(_latent(fields), **_layer_kinds(fields))
    return make(**{**chosen, **OVERRIDES.get(model_type, {}), **overrides})


def _latent(fields: dict[str, Any]) -> dict[str, Any]:
    """Latent attention has as many key as query heads, and a head size that follows from its parts."""
    if fields.get("kv_lora_rank") is None:
        return {}
    sizes = {"num_key_value_heads": 4}
    return {**sizes, "head_dim": 8} if fields.get("head_dim") == fields.get("qk_rope_head_dim") else sizes


def _layer_kinds(fields: dict[str, Any]) -> dict[str, list[str]]:
    """Each kind of layer in turn; one dense layer, then sparse ones."""
    chosen = {}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(fields.get(name) or []))
        if "dense" in kinds:
            chosen[name] = ["dense", *["sparse"] * (LAYERS - 1)]
        elif kinds == ["full_attention"] and "sliding_window" in fields:
            chosen[name] = ["sliding_attention", "full_attention"] * (LAYERS // 2)
        elif kinds:
            chosen[name] = (kinds * LAYERS)[:LAYERS]
    return chosen


def save_tiny(model_type: str, directory: Path, **overrides: Any) -> Path:
    """Save a seeded float32 checkpoint, with all towers of a multimodal family, and return its directory."""
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if model_type in TOWERS else AutoModelForCausalLM
    model = auto.from_config(tiny_config(model_type, **overrides)).float()
    with torch.no_grad():
        for tensor in _vectors(model):
            tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(directory)
    return directory


def _vectors(model: Any) -> Iterator[torch.Tensor]:
    """Norms, biases, sinks, and the buffers that only shift which experts are selected."""
    yield from (parameter for parameter in model.parameters() if parameter.ndim == 1)
    yield from (b for name, b in model.named_buffers() if "bias" in name and b.is_floating_point())
