"""find_routers on real transformers classes: names, order, numbers of experts and K, without running the model."""

from __future__ import annotations

import pytest
import torch
import transformers

from storage import RoutingSpec, Site

COMMON = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def spec_of(config: transformers.PretrainedConfig) -> RoutingSpec:
    with torch.device("meta"):
        return RoutingSpec.from_model(transformers.AutoModelForCausalLM.from_config(config))


def test_qwen3_moe() -> None:
    config = transformers.Qwen3MoeConfig(
        **COMMON, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8
    )
    gates = tuple(Site(f"model.layers.{i}.mlp.gate", i, 8, 3) for i in range(2))
    assert spec_of(config).sites == gates


def test_dense_layers_have_no_site() -> None:
    config = transformers.Qwen3MoeConfig(
        **COMMON, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, mlp_only_layers=[0]
    )
    assert spec_of(config).sites == (Site("model.layers.1.mlp.gate", 1, 8, 3),)


def test_mixtral_and_olmoe() -> None:
    mixtral = spec_of(transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2))
    olmoe = spec_of(transformers.OlmoeConfig(**COMMON, num_experts=8, num_experts_per_tok=2))
    assert [(site.layer, site.num_experts, site.top_k) for site in mixtral.sites] == [(0, 4, 2), (1, 4, 2)]
    assert [(site.layer, site.num_experts, site.top_k) for site in olmoe.sites] == [(0, 8, 2), (1, 8, 2)]


def test_a_dense_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoE router"):
        spec_of(transformers.LlamaConfig(**COMMON))
