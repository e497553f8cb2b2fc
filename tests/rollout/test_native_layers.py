"""Whole experts modules and RMS norms in our own kernels against float64 by hand, and which layers get them."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rollout import RolloutClient, SamplingParams
from rollout.experts import COMPACT, experts_output
from rollout.native import NativeKernels
from rollout.native_build import load_library
from rollout.native_layers import gates_with_silu, native_output, use_native_norms, use_native_products
from tests.rollout.test_experts import HEIGHTS, Experts, by_hand

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(load_library(), request.param)


def experts_of(dtype: torch.dtype, kernels: NativeKernels, size: int = 64) -> Experts:
    experts = Experts(dtype, size, False, False)
    use_native_products(nn.ModuleList([experts]), kernels)
    return experts


def routed(dtype: torch.dtype, tokens: int, slots: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(len(HEIGHTS) - 1, generator=generator)[:slots] for _ in range(tokens)])
    hidden = torch.randn(tokens, 64, generator=generator).to(dtype)
    return hidden, ids, torch.rand(tokens, slots, generator=generator).to(dtype)


@torch.inference_mode()
@dtypes
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_a_whole_experts_module_computes_what_float64_does(kernels, dtype, tokens) -> None:
    experts, given = experts_of(dtype, kernels), routed(dtype, tokens)
    found = native_output(experts, *given)
    hidden, ids, weights = given
    expected = sum(by_hand(experts, hidden, ids[:, s : s + 1], weights[:, s : s + 1]) for s in range(3))
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(found, experts_output(experts, *given, COMPACT))


@torch.inference_mode()
@dtypes
def test_a_token_has_the_same_bits_whoever_shares_the_step(kernels, dtype) -> None:
    experts, (hidden, ids, weights) = experts_of(dtype, kernels), routed(dtype, 12)
    whole = native_output(experts, hidden, ids, weights)
    for start, end in ((0, 1), (3, 4), (2, 9), (11, 12)):
        part = native_output(experts, hidden[start:end], ids[start:end], weights[start:end])
        assert torch.equal(part, whole[start:end])


@torch.inference_mode()
def test_rows_that_are_not_for_it_are_left_to_other_products(kernels) -> None:
    experts = experts_of(torch.float32, kernels)
    hidden, weights = torch.randn(33, 64), torch.ones(33, 1)
    one = torch.zeros(33, 1, dtype=torch.int64)
    assert native_output(experts, hidden, one, weights) is None  # 33 rows of one expert, 32 at most
    found = experts_output(experts, hidden, one, weights, COMPACT)
    torch.testing.assert_close(found.double(), by_hand(experts, hidden, one, weights), atol=1e-5, rtol=1e-5)
    assert native_output(experts, hidden[:32], one[:32].int(), weights[:32]) is not None
    assert native_output(experts, hidden.double(), one, weights) is None
    assert native_output(experts, hidden[:0], one[:0], weights[:0]).shape == (0, 64)
    for wrong in (-1, len(HEIGHTS)):
        assert native_output(experts, hidden[:1], torch.tensor([[wrong]]), weights[:1]) is None
    with pytest.raises(ValueError, match="expert id 7 for 7 experts"):
        experts_output(experts, hidden[:1], torch.tensor([[7]]), weights[:1], COMPACT)


@torch.inference_mode()
def test_the_gate_is_that_of_torch_for_large_values_and_nan(kernels) -> None:
    """One expert with an identity for each matrix: its output is silu(x) * x, then weighed."""
    experts = experts_of(torch.float32, kernels, 32)
    experts.gate_up_proj.zero_()[:, torch.arange(32), torch.arange(32) % 16] = 1
    experts.down_proj.zero_()[:, torch.arange(16), torch.arange(16)] = 1
    values = [0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 3, -3, 20, -20, 86, -86, 1e4, -1e4, 1e18, -1e18]
    hidden = torch.zeros(1, 32)
    hidden[0, :16] = torch.tensor(values)
    found = native_output(experts, hidden, torch.tensor([[2]]), torch.ones(1, 1))[0, :16]
    torch.testing.assert_close(found, F.silu(hidden[0, :16]) * hidden[0, :16], rtol=1e-6, atol=1e-32)
    hidden[0, 5] = math.nan
    assert native_output(experts, hidden, torch.tensor([[2]]), torch.ones(1, 1)).isnan().any()


class Gate(Experts):
    """Experts with another gate."""

    def __init__(self, gate: Any) -> None:
        super().__init__(torch.float32, 64, False, False)
        self._gate = gate

    def _apply_gate(self, projected: torch.Tensor) -> torch.Tensor:
        return self._gate(*projected.chunk(2, dim=-1))


def test_only_experts_that_gate_with_silu_are_computed_whole() -> None:
    assert gates_with_silu(Gate(lambda gate, up: F.silu(gate) * up))
    for other in (
        lambda gate, up: F.gelu(gate) * up,
        lambda gate, up: gate * F.silu(up),
        lambda gate, up: F.silu(gate) * (up + 1),
        lambda gate, up: F.silu(gate.clamp(max=10)) * up,
        lambda gate, up: F.silu(gate) * up.clamp(-10, 10),
        lambda gate, up: F.silu(gate).clamp(max=100) * up,
    ):
        assert not gates_with_silu(Gate(other))
    assert not gates_with_silu(Experts(torch.float32, 64, False, has_bias=True))
    experts = Gate(lambda gate, up: F.gelu(gate) * up)
    use_native_products(nn.ModuleList([experts]), NativeKernels(load_library()))
    assert set(experts.native_products) == {"gate_up_proj", "down_proj"}
    assert experts.native_module is None


class Norm(nn.Module):
    """As Llama's, but for what is said."""

    def __init__(self, width: int = 48, offset: float = 0, late: bool = False, stated_eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), stated_eps
        self.offset, self.late = offset, late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        weight = self.weight + self.offset
        return (weight.float() * normed).to(x.dtype) if self.late else weight * normed.to(x.dtype)


class FourDimensionalNorm(Norm):
    """Refuses rows of two dimensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, _, _, _ = x.shape
        return super().forward(x)


class GatedNorm(Norm):
    """Takes a second tensor."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


@torch.inference_mode()
@dtypes
def test_norms_are_those_of_float64(kernels, dtype) -> None:
    x = torch.randn(7, 48) * 10.0 ** torch.arange(-3, 4)[:, None]
    x, weight = x.to(dtype), torch.randn(48).to(dtype)
    found = kernels.rms_norm(x.view(1, 7, 48), weight, 1e-5)
    assert found.shape == (1, 7, 48)
    scale = (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(
        found[0].double(), weight.double() * (x.double() * scale), atol=1e-7, rtol=TOLERANCE[dtype]
    )
    alone = NativeKernels(load_library()).rms_norm(x[3:4], weight, 1e-5)
    assert torch.equal(alone[0], found[0, 3])
    x[2, 5] = math.nan
    assert kernels.rms_norm(x, weight, 1e-5).isnan().all(-1).tolist() == [i == 2 for i in range(7)]


def is_ours(module: nn.Module, dtype: torch.dtype) -> bool:
    module = module.to(dtype)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with contextlib.ExitStack() as undo:
        use_native_norms(module, NativeKernels(load_library()), undo)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        found = "forward" in vars(module)
    assert "forward" not in vars(module)
    return found


@dtypes
def test_only_norms_with_this_arithmetic_get_the_kernel(dtype) -> None:
    assert is_ours(Norm(), dtype)
    assert is_ours(Norm(late=True), dtype) is (dtype is torch.float32)  # in float32 nothing is rounded
    assert not is_ours(Norm(offset=1), dtype)
    assert not is_ours(Norm(stated_eps=1e-6), dtype)
    assert not is_ours(Norm(width=40), dtype)
    assert not is_ours(GatedNorm(), dtype)
    assert not is_ours(FourDimensionalNorm(), dtype)
    assert not is_ours(nn.LayerNorm(48, bias=False), dtype)
    assert not is_ours(nn.LayerNorm(48), dtype)


@torch.inference_mode()
def test_a_norm_follows_its_weight_and_leaves_other_inputs_to_the_model() -> None:
    norm, x = Norm(), torch.randn(2, 3, 48)
    use_native_norms(norm, NativeKernels(load_library()), contextlib.ExitStack())
    norm.weight.fill_(2)
    doubled = norm(x)
    norm.weight.data = torch.full((48,), 3.0)
    torch.testing.assert_close(norm(x), doubled * 1.5)
    for other in (x.transpose(0, 1), x.bfloat16(), x[:0]):
        torch.testing.assert_close(norm(other).float(), Norm.forward(norm, other).float())
    torch.testing.assert_close(norm(x=x), norm(x))
    with pytest.raises(RuntimeError, match="size of tensor"):
        norm(x[..., :32])


def test_an_engine_uses_both(checkpoint, monkeypatch) -> None:
    calls: dict[str, int] = {"gated_experts": 0, "rms_norm": 0}

    def counted(name: str) -> Any:
        real = getattr(NativeKernels, name)

        def count(self: Any, *given: Any) -> Any:
            calls[name] += 1
            return real(self, *given)

        return count

    for name in calls:
        monkeypatch.setattr(NativeKernels, name, counted(name))
    path = checkpoint("qwen3_moe", num_hidden_layers=2)
    with RolloutClient.local(path, dtype="float32") as client:
        before = dict(calls)
        client.sample([[5, 6, 7]], sampling_params=SamplingParams(max_tokens=4, ignore_eos=True))
        # four forwards of two layers: each with its experts and four norms, and one norm at the end
        assert {name: calls[name] - before[name] for name in calls} == {"gated_experts": 8, "rms_norm": 36}
