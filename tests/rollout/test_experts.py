"""The experts implementations against a loop written out here, whatever the heights of the groups, the dtype and the
order of the weights; and packed copies, which follow every change of the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rollout import memory, packed_experts
from rollout.device_memory import ParkedWeights
from rollout.experts import COMPACT, INVARIANT, Layout, experts_output, group_by_expert
from rollout.packed_experts import PackedWeight, forget_packed, pack_experts, packed_keep_bits

HEIGHTS = [0, 1, 2, 3, 8, 9, 40]  # rows of each expert
HIDDEN, WIDTH, BIG = 40, 24, 1024
HAS_BFLOAT16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="oneDNN has no bfloat16 kernels for this processor")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Experts(torch.nn.Module):
    """What transformers' experts interface hands to an implementation."""

    has_gate, has_post_expert_norm = True, False

    def __init__(self, dtype: torch.dtype, size: int, is_transposed: bool, has_bias: bool) -> None:
        super().__init__()
        self.num_experts, self.is_transposed, self.has_bias = len(HEIGHTS), is_transposed, has_bias
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype))

        count, width = len(HEIGHTS), size // 2
        up, down = (count, 2 * width, size), (count, size, width)
        self.gate_up_proj = made(*((up[0], up[2], up[1]) if is_transposed else up))
        self.down_proj = made(*((down[0], down[2], down[1]) if is_transposed else down))
        if has_bias:
            self.gate_up_proj_bias, self.down_proj_bias = made(count, 2 * width), made(count, size)

    def _apply_gate(self, projected: torch.Tensor) -> torch.Tensor:
        gate, up = projected.chunk(2, dim=-1)
        return F.silu(gate) * up


def inputs(dtype: torch.dtype, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token goes to one expert, so many to each as HEIGHTS says, shuffled."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.repeat_interleave(torch.arange(len(HEIGHTS)), torch.tensor(HEIGHTS))
    ids = ids[torch.randperm(len(ids), generator=generator)][:, None]
    hidden = torch.randn(len(ids), size, generator=generator).to(dtype)
    return hidden, ids, torch.rand(len(ids), 1, generator=generator).to(dtype)


def by_hand(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Token by token in float64."""
    rows = []
    for row, expert, weight in zip(hidden.double(), ids[:, 0].tolist(), weights.double(), strict=True):
        up, down = experts.gate_up_proj[expert].double(), experts.down_proj[expert].double()
        up, down = (up.t(), down.t()) if experts.is_transposed else (up, down)
        projected = up @ row + (experts.gate_up_proj_bias[expert].double() if experts.has_bias else 0)
        gate, value = projected.chunk(2)
        out = down @ (gate * gate.sigmoid() * value)
        rows.append(weight * (out + (experts.down_proj_bias[expert].double() if experts.has_bias else 0)))
    return torch.stack(rows)


@torch.inference_mode()
def computed(
    experts: Any, dtype: torch.dtype, size: int, layout: Layout = COMPACT
) -> tuple[torch.Tensor, torch.Tensor]:
    given = inputs(dtype, size)
    return experts_output(experts, *given, layout).double(), by_hand(experts, *given)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("size", [HIDDEN, BIG])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_outputs_are_those_of_a_loop_over_tokens(dtype, size, is_transposed, has_bias, packed) -> None:
    experts = Experts(dtype, size, is_transposed, has_bias)
    if packed:
        pack_experts(experts)
        expected = size == BIG if dtype is torch.float32 else HAS_BFLOAT16
        assert set(getattr(experts, "packed_weights", ())) == ({"gate_up_proj", "down_proj"} if expected else set())
    for layout in (COMPACT, Layout(2, 32), INVARIANT):
        found, expected = computed(experts, dtype, size, layout)
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@needs_bfloat16
def test_packed_bfloat16_products_have_the_bits_of_plain_ones() -> None:
    experts = Experts(torch.bfloat16, BIG, False, False)
    plain, _ = computed(experts, torch.bfloat16, BIG)
    pack_experts(experts)
    assert torch.equal(computed(experts, torch.bfloat16, BIG)[0], plain)


@pytest.mark.parametrize(
    ("dtype", "size"), [pytest.param(torch.bfloat16, HIDDEN, marks=needs_bfloat16), (torch.float32, BIG)]
)
def test_a_packed_copy_follows_changes_in_place_and_a_sleep(dtype, size) -> None:
    experts = Experts(dtype, size, False, False)
    pack_experts(experts)
    before, _ = computed(experts, dtype, size)
    with torch.no_grad():
        experts.gate_up_proj.mul_(-0.5)
    after, expected = computed(experts, dtype, size)
    torch.testing.assert_close(after, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not torch.allclose(after, before, atol=0.1)

    forget_packed(experts)
    parked = ParkedWeights(experts_model(experts), keep=False)
    assert not any(packed._packed for packed in experts.packed_weights.values())
    parked.restore()
    with torch.no_grad():
        for weight in experts.parameters():
            weight.copy_(torch.linspace(-0.2, 0.2, weight.numel()).view(weight.shape))
    woken, expected = computed(experts, dtype, size)
    torch.testing.assert_close(woken, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def experts_model(experts: Experts) -> Any:
    model = torch.nn.Module()
    model.experts = experts
    return model


def test_experts_are_not_packed_where_half_of_the_memory_would_not_hold_them(monkeypatch, caplog) -> None:
    experts = Experts(torch.float32, BIG, False, False)
    size = experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    caplog.set_level("INFO", "rollout.packed_experts")
    monkeypatch.setattr(packed_experts, "available_bytes", lambda: 2 * size - 2)
    pack_experts(experts)
    assert not hasattr(experts, "packed_weights")
    assert "experts are not packed" in caplog.text
    with pytest.raises(ValueError, match=r"more than half of .* GB that are left; use pack_weights=False in all"):
        pack_experts(experts, required=True)
    monkeypatch.setattr(packed_experts, "available_bytes", lambda: 2 * size)
    pack_experts(experts)
    assert hasattr(experts, "packed_weights")


def test_memory_left_is_between_nothing_and_all() -> None:
    import os

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes() < total


@pytest.mark.parametrize(("limit", "left"), [("max", None), ("1000000", 999_000)])
def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch, limit, left) -> None:
    (tmp_path / "limit").write_text(limit)
    (tmp_path / "used").write_text("1000")
    whole = memory.available_bytes()
    monkeypatch.setattr(memory, "CGROUP_FILES", [(tmp_path / "limit", tmp_path / "used")])
    found = memory.available_bytes()
    assert found == left if left is not None else found > whole / 2


def test_products_that_keep_bits_are_those_of_oneDNN() -> None:  # noqa: N802
    experts = Experts(torch.float32, BIG, False, False)
    pack_experts(experts)
    assert packed_keep_bits(experts)
    small = Experts(torch.float32, HIDDEN, False, False)
    pack_experts(small)
    assert not hasattr(small, "packed_weights")
    assert not packed_keep_bits(small)


def test_a_product_that_depends_on_its_height_is_seen(monkeypatch) -> None:
    weight = PackedWeight(torch.randn(1, 1024, 1024), False)
    real = weight.product
    monkeypatch.setattr(
        weight, "product", lambda rows, expert, out: (real(rows, expert, out), out.mul_(1 + 1e-6 * (len(rows) == 7)))
    )
    assert not weight.rows_keep_bits()


def test_groups_are_padded_as_asked() -> None:
    ids = torch.tensor([[2, 0], [2, 1]])
    groups = group_by_expert(ids, 3, Layout(min_rows=3, multiple=4))
    assert (groups.experts.tolist(), groups.starts.tolist()) == ([0, 1, 2], [0, 3, 6])
    assert (groups.heights.tolist(), len(groups.token)) == ([3, 3, 3], 12)
    assert groups.token[groups.row].tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="expert id 2 for 2 experts"):
        group_by_expert(ids, 2)


def test_a_model_without_experts_is_left_alone() -> None:
    model = SimpleNamespace(modules=lambda: [torch.nn.Linear(2, 2)])
    pack_experts(model)
    assert not packed_keep_bits(model)
