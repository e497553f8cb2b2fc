"""What replaces a model's own layers is taken away and put back, with the packed copies that there are."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import packed_experts
from rollout.fast_layers import FastLayers
from rollout.native import NativeKernels
from rollout.native_build import load_library


def model_of(checkpoint, **sizes):
    path = checkpoint("qwen3_moe", num_hidden_layers=1, hidden_size=512, moe_intermediate_size=512, **sizes)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("experts", ["hit_experts", "batch_invariant_experts"])
@torch.no_grad()
def test_layers_come_and_go_and_weights_are_packed_once(checkpoint, monkeypatch, experts) -> None:
    model, ids = model_of(checkpoint), torch.tensor([[5, 6, 7, 8]])
    model.set_experts_implementation("eager")
    expected = model(input_ids=ids).logits
    packed: list[int] = []
    pack = packed_experts.PackedWeight._pack
    monkeypatch.setattr(
        packed_experts.PackedWeight, "_pack", lambda self, expert: (packed.append(expert), pack(self, expert))[1]
    )
    native = NativeKernels(load_library())
    layers = FastLayers(model, experts, True, native)
    layers.use()
    first = len(packed)

    def wrapped() -> int:
        return sum("forward" in vars(module) for module in model.modules())

    count = wrapped()
    assert count >= 5  # norms, and linear layers where bits need not stay
    for kernels in (None, native):
        layers.use_kernels(kernels)
        assert layers.native is kernels
        torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    with layers.undone():
        assert wrapped() == 0
        assert model.config._experts_implementation == "eager"
        assert torch.equal(model(input_ids=ids).logits, expected)
    assert wrapped() == count
    assert model.config._experts_implementation == experts
    assert len(packed) == first
    layers.undo()
    assert wrapped() == 0


def test_a_second_use_counts_the_memory_that_the_copies_take(checkpoint, monkeypatch, caplog) -> None:
    """There was room for all copies, and for no more."""
    model = model_of(checkpoint)
    left = [2 * packed_bytes_of(model)]
    taken = packed_experts.packed_bytes
    monkeypatch.setattr(packed_experts, "available_bytes", lambda: left[0] - taken(model.modules()))
    layers = FastLayers(model, "hit_experts", True, None)
    layers.use()
    with layers.undone():
        pass
    assert "packed, and slower" not in caplog.text
    assert hasattr(model.lm_head, "packed_weights")


def packed_bytes_of(model) -> int:
    layers = FastLayers(model, "hit_experts", True, None)
    layers.use()
    layers.undo()
    size = packed_experts.packed_bytes(model.modules())
    for module in model.modules():
        vars(module).pop("packed_weights", None)
    return size
