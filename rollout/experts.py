"""Experts implementations of our own, registered through transformers' public experts interface. Inference only.

`hit_experts` sorts the (token, slot) pairs by expert and runs one pair of matrix products per expert that was hit, of
few rows with kernels of our own (native.py); transformers' CPU `grouped_mm` visits all experts.
`batch_invariant_experts` uses products in which a row's bits do not depend on how many rows share them (checked at
start, see self_test.py): of packed weights, of our own kernels, or of 16 rows and more.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rollout.native import NativeKernels, fit_vectors, fits
from rollout.native_layers import Native, forget_native, native_output, use_native_experts, use_native_products
from rollout.packed_experts import MIN_PACKED_ROWS, is_experts, pack_experts, packed_keep_bits, projections
from rollout.router import wrap_forward

MIN_ROWS = 16
# silu and sigmoid compute the last elements of a tensor, those that fill no pair of SIMD registers, in other last bits.
# A multiple of 32 rows leaves none.
ROW_MULTIPLE = 32
# Up to here the transposed product took 0.4 to 0.8 of the time on an AMD EPYC (AVX-512); beyond, up to twice as long.
FEW_ROWS = 8
FEW_VALUES = 2048
_PRODUCTS = frozenset({F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__})


class Layout(NamedTuple):
    """How low a group of rows may be, and of what number all rows are a multiple."""

    min_rows: int = 1
    multiple: int = 1


COMPACT = Layout()
INVARIANT = Layout(MIN_ROWS, ROW_MULTIPLE)


class Groups(NamedTuple):
    """(token, slot) pairs laid out in groups by expert, with rows of padding behind a group that is too low, and behind
    all.

    `row` int64 `[tokens * K]`: where each pair lies; `token` int64 `[rows]`: whose hidden state a row has, in rows of
    padding anyone's. Of each group, int64: its expert, its first row, how many rows it has.
    """

    row: torch.Tensor
    token: torch.Tensor
    experts: np.ndarray
    starts: np.ndarray
    heights: np.ndarray

    def where(self, chosen: np.ndarray | slice) -> Iterator[tuple[int, int, int]]:
        """Expert, first row and behind the last row of the `chosen` groups."""
        starts, heights = self.starts[chosen], self.heights[chosen]
        return zip(self.experts[chosen].tolist(), starts.tolist(), (starts + heights).tolist(), strict=True)


def group_by_expert(ids: torch.Tensor, num_experts: int, layout: Layout = COMPACT) -> Groups:
    """Groups of `[tokens, K]` ids.

    >>> group_by_expert(torch.tensor([[2, 0], [2, 1]]), num_experts=3)
    Groups(row=tensor([2, 0, 3, 1]), token=tensor([0, 1, 0, 1]), experts=array([0, 1, 2]), starts=array([0, 1, 2]),
    heights=array([1, 1, 2]))
    """
    flat = ids.reshape(-1).numpy()
    counts = np.bincount(flat, minlength=num_experts)
    if len(counts) > num_experts:
        raise ValueError(f"expert id {len(counts) - 1} for {num_experts} experts; use experts_implementation='eager'")
    heights = np.where(counts > 0, np.maximum(counts, layout.min_rows), 0)
    size = int(heights.sum())
    order = np.argsort(flat, kind="stable")
    starts = np.cumsum(heights) - heights
    shift = starts - (np.cumsum(counts) - counts)
    row, token = np.empty_like(order), np.zeros(size + -size % layout.multiple, np.int64)
    row[order] = np.arange(len(flat)) + np.repeat(shift, counts)
    token[row] = np.arange(len(flat)) // ids.shape[1]
    hit = np.flatnonzero(counts)
    return Groups(torch.from_numpy(row), torch.from_numpy(token), hit, starts[hit], heights[hit])


def hit_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Expert outputs `[tokens, hidden]` for ids and weights `[tokens, K]`; one GEMM pair per hit expert."""
    return experts_output(self, hidden, top_k_index, top_k_weights, COMPACT)


def batch_invariant_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The same with products that keep a row's bits, and rows in a multiple of 32."""
    return experts_output(self, hidden, top_k_index, top_k_weights, self.batch_invariant_layout)


def experts_output(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, layout: Layout
) -> torch.Tensor:
    """Outputs `[tokens, hidden]` of an experts module."""
    whole = native_output(self, hidden, top_k_index, top_k_weights)
    if whole is not None:
        return whole
    tokens, slots = top_k_index.shape
    groups = group_by_expert(top_k_index, self.num_experts, layout)
    rows = hidden.index_select(0, groups.token)
    any_product = layout is COMPACT
    projected = _grouped_linear(self, "gate_up_proj" if self.has_gate else "up_proj", rows, groups, any_product)
    activated = self._apply_gate(projected) if self.has_gate else self.act_fn(projected)
    out = _grouped_linear(self, "down_proj", activated, groups, any_product)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    native = getattr(self, "native_products", {}).get("down_proj")
    if (
        native is not None
        and out.dtype is hidden.dtype
        and top_k_weights.shape == top_k_index.shape
        and fit_vectors(out)
    ):
        return native.kernels.weighted_sum(out, groups.row, top_k_weights)
    weighted = out[groups.row].view(tokens, slots, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden.dtype)


def _grouped_linear(self: Any, name: str, rows: torch.Tensor, groups: Groups, any_product: bool) -> torch.Tensor:
    """`any_product`: whether each may be computed in the way that is fastest for its size, or all in one way."""
    weight = getattr(self, name)
    if self.is_transposed:
        weight = weight.transpose(-2, -1)
    packed = getattr(self, "packed_weights", {}).get(name)
    native: Native | None = getattr(self, "native_products", {}).get(name)
    filled = int(groups.heights.sum())
    out = rows.new_empty(len(rows), weight.shape[1])
    if filled < len(rows):
        out[filled:] = 0
    few = np.zeros(len(groups.experts), bool)
    if native is not None and groups.experts.max(initial=0) < len(weight):
        few = groups.heights <= native.most_rows
    if native is not None and few.any():
        chosen = (torch.from_numpy(each[few]) for each in (groups.experts, groups.starts, groups.heights))
        native.kernels.grouped_linear(rows, weight, out, *chosen)
    for expert, start, end in groups.where(~few):
        given, made = rows[start:end], out[start:end]
        if any_product and _is_few(given):
            made.copy_(torch.mm(weight[expert], given.t()).t())
        elif packed is not None and (not any_product or packed.is_faster(len(given))):
            packed.product(given, expert, made)
        else:
            torch.mm(given, weight[expert].t(), out=made)
    for expert, start, end in groups.where(slice(None)) if self.has_bias else ():
        out[start:end] += getattr(self, f"{name}_bias")[expert]
    return out


def _is_few(rows: torch.Tensor) -> bool:
    """MKL has slow fp32 kernels for a few short rows; of the transposed product it has fast ones."""
    return 1 < len(rows) <= FEW_ROWS and rows.numel() <= FEW_VALUES and rows.dtype is torch.float32


def use_experts_implementation(
    model: Any, name: str, pack: bool, native: NativeKernels | None, undo: contextlib.ExitStack
) -> None:
    """Switch `model` to the experts implementation `name`, ours or transformers'; for ours `pack`, see
    packed_experts.py, and `native`, see native.py. `undo` gets what makes it ready for another one."""
    undo.callback(forget_native, model)
    ALL_EXPERTS_FUNCTIONS.register("hit_experts", hit_experts)
    ALL_EXPERTS_FUNCTIONS.register("batch_invariant_experts", batch_invariant_experts)
    model.set_experts_implementation(name)
    if pack and name in ("hit_experts", "batch_invariant_experts"):
        pack_experts(model, required=name == "batch_invariant_experts")
    if name == "hit_experts":
        use_native_products(model, native)
    if name == "batch_invariant_experts":
        packed = packed_keep_bits(model)
        for module in model.modules():
            if is_experts(module):
                _keep_bits(module, packed, native)
            elif type(module).__name__.endswith("Experts"):
                undo.callback(wrap_forward(module, _with_padded_products))


def _keep_bits(experts: Any, packed: bool, native: NativeKernels | None) -> None:
    """Choose products that keep a row's bits among any number of rows: of packed weights where these do, else our own,
    else of at least 16 rows."""
    if packed:
        experts.batch_invariant_layout = Layout(MIN_PACKED_ROWS, ROW_MULTIPLE)
        return
    experts.packed_weights = {}
    weights = projections(experts)
    if native is not None and not experts.is_transposed and all(fits(weight) for weight in weights.values()):
        experts.batch_invariant_layout = Layout(multiple=ROW_MULTIPLE)
        use_native_experts(experts, native, dict.fromkeys(weights, sys.maxsize))
    else:
        experts.batch_invariant_layout = INVARIANT
        _lay_out_by_input(experts)


def _lay_out_by_input(experts: Any) -> None:
    """Order the values of the weights as products of 16 rows and more read them fastest: shapes and values stay."""
    for weight in () if experts.is_transposed else projections(experts).values():
        if weight.dtype is torch.float32:
            with torch.inference_mode(False):
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
