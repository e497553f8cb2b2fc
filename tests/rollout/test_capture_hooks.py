"""Capture at the routers: every router once, in order, one row per token, or there is an error."""

import itertools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from rollout import RolloutClient
from rollout.capture import RoutedExpertsCapturer
from storage import RoutingSpec


@pytest.fixture
def model():
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def capturer(model):
    capturer = RoutedExpertsCapturer(model, RoutingSpec.from_model(model), max_batch_tokens=16)
    yield capturer
    capturer.close()


@torch.no_grad()
def forward(model, tokens):
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits


def router_outputs(model, tokens) -> np.ndarray:
    """Ids `[T, sites, K]` as each router returns them, seen by other hooks."""
    seen = []
    routers = [layer.mlp.gate for layer in model.model.layers]
    handles = [router.register_forward_hook(lambda _m, _a, out: seen.append(out[2])) for router in routers]
    forward(model, tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).numpy()


def test_capture_equals_what_the_routers_return_and_changes_no_logit(model):
    tokens = [3, 1, 4, 1, 5]
    plain, truth = forward(model, tokens), router_outputs(model, tokens)
    capturer = RoutedExpertsCapturer(model, RoutingSpec.from_model(model), max_batch_tokens=16)
    capturer.on_forward_begin()
    assert torch.equal(forward(model, tokens), plain)
    captured = capturer.on_forward_end(torch.arange(5)).routed_experts
    assert captured.dtype == torch.uint8
    assert np.array_equal(captured.numpy(), truth)


def test_the_snapshot_is_no_view_of_the_buffer(model, capturer):
    """The next forward writes the same buffer; what was handed out before stays (sglang#34319)."""
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    first = capturer.on_forward_end(torch.arange(3)).routed_experts
    kept = first.clone()
    capturer.on_forward_begin()
    forward(model, [20, 21, 22])
    second = capturer.on_forward_end(torch.arange(3)).routed_experts
    assert not torch.equal(second, kept), "the two prompts must differ for this test to mean anything"
    assert torch.equal(first, kept)
    assert np.array_equal(kept.numpy(), router_outputs(model, [3, 1, 4]))


def test_padding_rows_are_left_out(model, capturer):
    """A batch of two tokens and three of padding gives two rows (sglang#36404)."""
    capturer.on_forward_begin()
    forward(model, [3, 1, 0, 0, 0])
    out = capturer.on_forward_end(torch.tensor([7, 8]), forwards=[5])
    assert out.routed_experts.shape == (2, 3, 2)
    assert np.array_equal(out.routed_experts.numpy(), router_outputs(model, [3, 1, 0, 0, 0])[:2])


def test_the_forwards_of_one_step_lie_one_behind_the_other(model, capturer):
    capturer.on_forward_begin()
    forward(model, [3, 1])
    forward(model, [4, 1, 5])
    out = capturer.on_forward_end(torch.arange(5), forwards=[2, 3])
    truth = [router_outputs(model, [3, 1]), router_outputs(model, [4, 1, 5])]
    assert np.array_equal(out.routed_experts.numpy(), np.concatenate(truth))


def test_a_router_that_never_fires_is_an_error_not_a_row_of_zeros(model, capturer):
    """As when a fused kernel routes inside (vllm#44116)."""
    capturer.on_forward_begin()
    for layer in (0, 2):
        model.model.layers[layer].mlp.gate(torch.zeros(3, 16))
    with pytest.raises(RuntimeError, match="routing cannot be recorded"):
        capturer.on_forward_end(torch.arange(3))


def test_a_router_that_fires_twice_is_an_error(model, capturer):
    """As when a draft model or a recomputation runs it again (vllm#48622)."""
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    model.model.layers[1].mlp.gate(torch.zeros(3, 16))
    with pytest.raises(RuntimeError, match=r"\(1, 3\)\], expected each of 3 sites once"):
        capturer.on_forward_end(torch.arange(3))


def test_another_number_of_rows_than_tokens_is_an_error(model, capturer):
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    with pytest.raises(RuntimeError, match=r"expected each of 3 sites once.* with \[4\] rows"):
        capturer.on_forward_end(torch.arange(4))


def test_more_tokens_than_the_buffer_holds_is_an_error(model, capturer):
    capturer.on_forward_begin()
    with pytest.raises(RuntimeError):
        forward(model, [1] * 17)


def test_a_forward_that_failed_half_way_does_not_spoil_the_next(model, capturer):
    capturer.on_forward_begin()
    model.model.layers[0].mlp.gate(torch.zeros(3, 16))
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    assert capturer.on_forward_end(torch.arange(3)).routed_experts.shape == (3, 3, 2)


def test_copying_at_the_end_of_the_forward_is_refused(capturer):
    with pytest.raises(ValueError, match=r"copied by GenerationBatchResult\.copy_to_cpu"):
        capturer.on_forward_end(torch.arange(0), no_copy_to_cpu=False)


def test_close_removes_every_hook(model):
    capturer = RoutedExpertsCapturer(model, RoutingSpec.from_model(model), max_batch_tokens=4)
    capturer.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_more_than_256_experts_are_captured_as_uint16():
    spec = RoutingSpec.uniform(num_sites=1, num_experts=300, top_k=1)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=300,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
        model.model.layers[0].mlp.gate.weight[299] = 1.0
        hidden = torch.ones(2, 8)
        capturer = RoutedExpertsCapturer(model, spec, max_batch_tokens=4)
        capturer.on_forward_begin()
        model.model.layers[0].mlp.gate(hidden)
    routes = capturer.on_forward_end(torch.arange(2)).routed_experts
    assert routes.dtype == torch.uint16
    assert routes.numpy().ravel().tolist() == [299, 299]


@pytest.mark.parametrize("bypassed", [(0, 1), (1,)], ids=["all routers", "one router"])
def test_a_kernel_that_routes_internally_is_refused_at_start(checkpoint, monkeypatch, bypassed):
    """The block computes the router's scores itself, as a fused kernel does: its hook never fires (vllm#44116)."""
    forward = Qwen3MoeSparseMoeBlock.forward
    count = itertools.count()

    def fused(self, hidden):
        if next(count) % 2 not in bypassed:
            return forward(self, hidden)
        flat = hidden.view(-1, hidden.shape[-1])
        weights, ids = (flat @ self.gate.weight.T).softmax(-1).topk(self.gate.top_k)
        return self.experts(flat, ids, weights).view(hidden.shape)

    monkeypatch.setattr(Qwen3MoeSparseMoeBlock, "forward", fused)
    with pytest.raises((ValueError, RuntimeError), match="routing cannot be recorded"):
        RolloutClient.local(checkpoint("qwen3_moe"))
