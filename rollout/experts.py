"""Experts implementations of our own, registered through transformers' public experts interface. Inference only.

`hit_experts` sorts the (token, slot) pairs by expert and runs one pair of matrix products per expert that was hit;
transformers' CPU `grouped_mm` visits all experts. `batch_invariant_experts` lays each group out in at least 16 rows:
from there on a row's bits do not depend on how many rows share the product (checked at start, see self_test.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rollout.router import wrap_forward

MIN_ROWS = 16
# silu and sigmoid compute the last elements of a tensor, those that fill no pair of SIMD registers, in other last bits.
# A multiple of 32 rows leaves none.
ROW_MULTIPLE = 32
_PRODUCTS = frozenset({F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})


class Groups(NamedTuple):
    """(token, slot) pairs in groups by expert. `row` int64 `[tokens * K]`: where each pair lies in the groups' layout;
    `bounds`: (expert, start, end) of each hit expert; `size`: rows of the layout, with padding."""

    row: torch.Tensor
    bounds: list[tuple[int, int, int]]
    size: int


def group_by_expert(ids: torch.Tensor, num_experts: int, min_rows: int) -> Groups:
    """Groups of `[tokens, K]` ids, each at least `min_rows` high.

    >>> group_by_expert(torch.tensor([[2, 0], [2, 1]]), num_experts=3, min_rows=1)
    Groups(row=tensor([2, 0, 3, 1]), bounds=[(0, 0, 1), (1, 1, 2), (2, 2, 4)], size=4)
    """
    flat = ids.reshape(-1)
    counts = torch.bincount(flat, minlength=num_experts)
    if len(counts) > num_experts:
        raise ValueError(f"expert id {len(counts) - 1} for {num_experts} experts; use experts_implementation='eager'")
    heights = counts.clamp_min(min_rows) * (counts > 0)
    starts = heights.cumsum(0) - heights
    order = flat.argsort(stable=True)
    rank = torch.arange(len(flat)) - (counts.cumsum(0) - counts)[flat[order]]
    row = torch.empty_like(flat)
    row[order] = starts[flat[order]] + rank
    bounds = [(e, a, a + h) for e, (a, h) in enumerate(zip(starts.tolist(), heights.tolist(), strict=True)) if h]
    return Groups(row, bounds, bounds[-1][2])


def hit_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Expert outputs `[tokens, hidden]` for ids and weights `[tokens, K]`; one GEMM pair per hit expert."""
    return experts_output(self, hidden, top_k_index, top_k_weights, min_rows=1)


def batch_invariant_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The same with every GEMM at least 16 rows high, and the layout a multiple of 32 rows."""
    return experts_output(self, hidden, top_k_index, top_k_weights, min_rows=MIN_ROWS)


def experts_output(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, min_rows: int
) -> torch.Tensor:
    """Outputs `[tokens, hidden]` of an experts module. `min_rows` above 1 pads each group, and the whole layout too."""
    tokens, slots = top_k_index.shape
    groups = group_by_expert(top_k_index, self.num_experts, min_rows)
    height = groups.size + (-groups.size % ROW_MULTIPLE if min_rows > 1 else 0)
    make = hidden.new_empty if height == len(groups.row) else hidden.new_zeros  # padding must be finite
    rows = make(height, hidden.shape[-1])
    rows[groups.row] = hidden.repeat_interleave(slots, dim=0)
    projected = _grouped_linear(self, "gate_up_proj" if self.has_gate else "up_proj", rows, groups)
    activated = self._apply_gate(projected) if self.has_gate else self.act_fn(projected)
    out = _grouped_linear(self, "down_proj", activated, groups)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = out[groups.row].view(tokens, slots, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden.dtype)


def _grouped_linear(self: Any, name: str, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
    weight = getattr(self, name)
    if not self.is_transposed:
        weight = weight.transpose(-2, -1)
    out = rows.new_empty(len(rows), weight.shape[-1])
    for expert, start, end in groups.bounds:
        torch.mm(rows[start:end], weight[expert], out=out[start:end])
        if self.has_bias:
            out[start:end] += getattr(self, f"{name}_bias")[expert]
    return out


def use_experts_implementation(model: Any, name: str) -> None:
    """Switch `model` to the experts implementation `name`, ours or transformers'."""
    ALL_EXPERTS_FUNCTIONS.register("hit_experts", hit_experts)
    ALL_EXPERTS_FUNCTIONS.register("batch_invariant_experts", batch_invariant_experts)
    model.set_experts_implementation(name)
    if name == "batch_invariant_experts":
        for module in model.modules():
            if type(module).__name__.endswith("Experts") and not hasattr(module, "has_gate"):
                wrap_forward(module, _with_padded_products)


class _PaddedProducts(TorchFunctionMode):
    """Gives each matrix product in it a multiple of 32 rows: for the few families (dbrx, jetmoe, longcat_flash) whose
    experts do not go through transformers' experts interface."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS or args[0].ndim != 2 or len(args[0]) % ROW_MULTIPLE == 0:
            return func(*args, **kwargs)
        rows = len(args[0])
        return func(F.pad(args[0], (0, 0, 0, -rows % ROW_MULTIPLE)), *args[1:], **kwargs)[:rows]


def _with_padded_products(forward: Callable[..., Any]) -> Callable[..., Any]:
    def padded(*args: Any, **kwargs: Any) -> Any:
        with _PaddedProducts():
            return forward(*args, **kwargs)

    return padded
