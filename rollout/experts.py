"""Experts implementations of our own, registered through transformers' public experts interface. Inference only.

`hit_experts` sorts the (token, slot) pairs by expert and runs one pair of matrix products per expert that was hit;
transformers' CPU `grouped_mm` visits all experts. `batch_invariant_experts` lays each group out in at least 16 rows:
from there on a row's bits do not depend on how many rows share the product (checked at start, see self_test.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rollout.router import wrap_forward

MIN_ROWS = 16
# silu and sigmoid compute the last elements of a tensor, those that fill no pair of SIMD registers, in other last bits.
# A multiple of 32 rows leaves none.
ROW_MULTIPLE = 32
# Up to here the transposed product took 0.4 to 0.8 of the time on an AMD EPYC (AVX-512); beyond, up to twice as long.
FEW_ROWS = 8
FEW_VALUES = 2048
_PRODUCTS = frozenset({F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})


class Groups(NamedTuple):
    """(token, slot) pairs laid out in groups by expert, with rows of padding behind a group that is too low, and behind
    all.

    `row` int64 `[tokens * K]`: where each pair lies; `token` int64 `[rows]`: whose hidden state a row has, in rows of
    padding anyone's; `experts`: those that were hit, and `heights`: how many rows each of them has.
    """

    row: torch.Tensor
    token: torch.Tensor
    experts: list[int]
    heights: list[int]


def group_by_expert(ids: torch.Tensor, num_experts: int, min_rows: int) -> Groups:
    """Groups of `[tokens, K]` ids, each at least `min_rows` high; with padding also all of them a multiple of 32 rows.

    >>> group_by_expert(torch.tensor([[2, 0], [2, 1]]), num_experts=3, min_rows=1)
    Groups(row=tensor([2, 0, 3, 1]), token=tensor([0, 1, 0, 1]), experts=[0, 1, 2], heights=[1, 1, 2])
    """
    flat = ids.reshape(-1).numpy()
    counts = np.bincount(flat, minlength=num_experts)
    if len(counts) > num_experts:
        raise ValueError(f"expert id {len(counts) - 1} for {num_experts} experts; use experts_implementation='eager'")
    heights = np.where(counts > 0, np.maximum(counts, min_rows), 0)
    size = int(heights.sum())
    order = np.argsort(flat, kind="stable")
    shift = np.cumsum(heights) - heights - (np.cumsum(counts) - counts)
    row, token = np.empty_like(order), np.zeros(size + (-size % ROW_MULTIPLE if min_rows > 1 else 0), np.int64)
    row[order] = np.arange(len(flat)) + np.repeat(shift, counts)
    token[row] = np.arange(len(flat)) // ids.shape[1]
    hit = np.flatnonzero(counts)
    return Groups(torch.from_numpy(row), torch.from_numpy(token), hit.tolist(), heights[hit].tolist())


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
    rows = hidden.index_select(0, groups.token)
    projected = _grouped_linear(self, "gate_up_proj" if self.has_gate else "up_proj", rows, groups)
    activated = self._apply_gate(projected) if self.has_gate else self.act_fn(projected)
    out = _grouped_linear(self, "down_proj", activated, groups)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = out[groups.row].view(tokens, slots, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden.dtype)


def _grouped_linear(self: Any, name: str, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
    weight = getattr(self, name)
    if self.is_transposed:
        weight = weight.transpose(-2, -1)
    padding = len(rows) - sum(groups.heights)
    out = rows.new_empty(len(rows), weight.shape[-2])
    if padding:
        out[-padding:] = 0
    heights = [*groups.heights, padding]
    for expert, given, made in zip(groups.experts, rows.split(heights), out.split(heights), strict=False):
        _product(given, weight[expert], made)
        if self.has_bias:
            made += getattr(self, f"{name}_bias")[expert]
    return out


def _product(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`rows @ weight.T`. MKL has slow fp32 kernels for a few short rows; of the transposed product it has fast ones."""
    if 2 <= len(rows) <= FEW_ROWS and rows.numel() <= FEW_VALUES and rows.dtype is torch.float32:
        out.copy_(torch.mm(weight, rows.t()).t())
    else:
        torch.mm(rows, weight.t(), out=out)


def use_experts_implementation(model: Any, name: str) -> None:
    """Switch `model` to the experts implementation `name`, ours or transformers'."""
    ALL_EXPERTS_FUNCTIONS.register("hit_experts", hit_experts)
    ALL_EXPERTS_FUNCTIONS.register("batch_invariant_experts", batch_invariant_experts)
    model.set_experts_implementation(name)
    if name == "batch_invariant_experts":
        for module in model.modules():
            if hasattr(module, "has_gate"):
                _lay_out_by_input(module)
            elif type(module).__name__.endswith("Experts"):
                wrap_forward(module, _with_padded_products)


def _lay_out_by_input(experts: Any) -> None:
    """Order the values of the weights as products of 16 rows and more read them fastest: shapes and values stay."""
    for name in () if experts.is_transposed else ("gate_up_proj", "up_proj", "down_proj"):
        weight = getattr(experts, name, None)
        if weight is not None and weight.dtype is torch.float32:
            weight.data = weight.data.transpose(-2, -1).contiguous().transpose(-2, -1)


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
