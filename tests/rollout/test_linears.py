"""Linear layers with packed weights and our own kernels against float64 by hand."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from rollout import RolloutClient, SamplingParams
from rollout.linears import use_fast_linears
from rollout.native import NativeKernels
from rollout.native_build import load_library
from rollout.packed_experts import forget_packed, repack
from tests.rollout.test_experts import HAS_BFLOAT16

HAS_FLOAT32 = torch.backends.mkldnn.is_available()
needs_packing = pytest.mark.skipif(not HAS_FLOAT32, reason="oneDNN is not there")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="no kernels"))],
)


def layer_of(dtype: torch.dtype, bias: bool, native: NativeKernels | None) -> nn.Linear:
    torch.manual_seed(0)
    with torch.inference_mode(False):  # whose tensors count no changes
        layer = nn.Linear(256, 160, bias=bias).to(dtype)
    use_fast_linears(nn.Sequential(layer), native, 1e9, contextlib.ExitStack())
    assert "forward" in vars(layer)
    return layer


def by_hand(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    out = x.double() @ layer.weight.double().t()
    return out if layer.bias is None else out + layer.bias.double()


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("native", [0, 1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_float64(dtype, bias, native) -> None:
    layer = layer_of(dtype, bias, NativeKernels(load_library(), native) if native else None)
    assert layer(torch.randn(0, 256).to(dtype)).shape == (0, 160)
    for rows in (1, 8, 9, 16, 17, 70):
        x = torch.randn(1, rows, 256).to(dtype)
        found = layer(x)
        assert found.shape == (1, rows, 160)
        torch.testing.assert_close(found.double(), by_hand(layer, x), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    backwards = torch.randn(256, 3).to(dtype).t()
    torch.testing.assert_close(
        layer(backwards).double(), by_hand(layer, backwards), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@torch.inference_mode()
@pytest.mark.parametrize("rows", [3, 30])
def test_products_follow_the_weights(rows) -> None:
    layer = layer_of(torch.float32, False, NativeKernels(load_library()))
    x = torch.randn(rows, 256)
    before = layer(x)
    with torch.inference_mode(False), torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), 2 * before)
    layer.weight.data = layer.weight.data * 1.5
    torch.testing.assert_close(layer(x), 3 * before)
    forget_packed(nn.Sequential(layer))
    torch.testing.assert_close(layer(x), 3 * before)
    repack(nn.Sequential(layer))
    torch.testing.assert_close(layer(x.double().float()), 3 * before)


@needs_packing
def test_layers_that_gain_nothing_or_are_of_another_kind_keep_their_forward() -> None:
    class Other(nn.Linear):
        pass

    layers = nn.Sequential(nn.Linear(128, 128), Other(256, 256), nn.Linear(256, 256).half(), nn.Linear(256, 256))
    with contextlib.ExitStack() as undo:
        use_fast_linears(layers, None, 1e9, undo)
        assert ["forward" in vars(layer) for layer in layers] == [False, False, False, True]
    assert not any("forward" in vars(layer) for layer in layers)


@needs_packing
@torch.inference_mode()
def test_what_the_budget_does_not_hold_is_not_packed(caplog) -> None:
    with torch.inference_mode(False):
        layer = nn.Linear(256, 256, bias=False)
    native, x = NativeKernels(load_library()), torch.randn(4, 256)
    expected = layer(x)
    for kernels in (None, native):
        use_fast_linears(nn.Sequential(layer), kernels, layer.weight.nbytes - 1, contextlib.ExitStack())
        assert not hasattr(layer, "packed_weights")
        assert ("forward" in vars(layer)) is (kernels is native)
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    assert caplog.text.count("linear layers are not packed, and slower: 0.0 GB of copies, and 0.0 are left") == 2


@pytest.mark.parametrize(
    ("options", "wrapped", "packed"),
    [
        ({}, True, HAS_FLOAT32),
        ({"pack_weights": False}, True, False),
        ({"pack_weights": False, "native_kernels": False}, False, False),
        ({"batch_invariant": True}, False, False),
    ],
)
def test_an_engine_uses_them_unless_rows_must_keep_their_bits_and_gives_them_back(
    checkpoint, options, wrapped, packed
) -> None:
    path = checkpoint("qwen3_moe", hidden_size=512)
    with RolloutClient.local(path, dtype="float32", **options) as client:
        client.sample([[5, 6]], sampling_params=SamplingParams(max_tokens=2))
        model = client.backend._built.runner.model
        assert ("forward" in vars(model.lm_head)) is wrapped
        assert hasattr(model.lm_head, "packed_weights") is packed
    assert not any("forward" in vars(module) for module in model.modules())
