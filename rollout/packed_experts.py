"""A second copy of expert weights, in the order of values that products on a CPU read fastest.

That is oneDNN's own: with weights in the plain order it rearranges them within each product in bfloat16, and float32 is
left to MKL, which is slow for few rows. Products of 1 to 16 rows with 1,024 x 1,024 values took 0.6 to 0.7 of the time
on an AMD EPYC (AVX-512), in bfloat16 with the same bits; small float32 weights gained nothing. The operators are those
that torch.compile emits for a linear layer whose weights are constant.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from rollout.memory import available_bytes

logger = logging.getLogger(__name__)
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
PACKED_FOR_ROWS = 16  # any number gives a valid order; this one was the fastest or near it from 1 to 256 rows
MAX_SHARE_OF_MEMORY = 0.5
CHECKED_ROWS = 48
MIN_FLOAT32_VALUES = 1 << 18
MIN_PACKED_ROWS = 2  # a single row of a large weight has a kernel of its own, and other bits


class PackedWeight:
    """One weight, `[experts, out, in]`, packed expert by expert, or one matrix, `[out, in]`; anew when it changed."""

    def __init__(self, weight: torch.Tensor, is_transposed: bool = False) -> None:
        self._weight = weight
        self._is_transposed = is_transposed
        self._packed: dict[int, torch.Tensor] = {}
        self._seen = self._state()
        self._min_rows = 2 if weight.dtype is torch.float32 else 1

    @property
    def shape(self) -> torch.Size:
        """As the model has it."""
        return self._weight.shape

    @property
    def nbytes(self) -> int:
        """Of the copy, when all is packed."""
        return self._weight.nbytes

    def is_faster(self, rows: int) -> bool:
        """Than a product of so many rows with the plain weight, as measured."""
        return rows >= self._min_rows

    def product(self, rows: torch.Tensor, expert: int, out: torch.Tensor) -> None:
        """Write `rows @ weight[expert].T` of `[rows, in]` into `out`."""
        out.copy_(self.linear(rows, expert))

    def linear(self, rows: torch.Tensor, expert: int = 0, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`rows @ weight[expert].T + bias` of `[rows, in]`."""
        self._forget_if_changed()
        packed = self._packed.get(expert)
        if packed is None:
            packed = self._pack(expert)
        return torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")

    def rows_keep_bits(self) -> bool:
        """Whether a row's product has the same bits among any number of rows from 2 on: tried on random rows."""
        outputs, inputs = self._matrix(0).shape
        rows = torch.randn(CHECKED_ROWS, inputs, generator=torch.Generator().manual_seed(0)).to(self._weight.dtype)

        def product(start: int, end: int) -> torch.Tensor:
            out = rows.new_empty(end - start, outputs)
            self.product(rows[start:end], 0, out)
            return out

        whole = product(0, CHECKED_ROWS)
        return all(
            torch.equal(product(start, end), whole[start:end])
            for end in range(MIN_PACKED_ROWS, CHECKED_ROWS + 1)
            for start in (0, end - MIN_PACKED_ROWS)
        )

    def pack(self) -> None:
        """Pack what is not packed, now rather than at the next product."""
        self._forget_if_changed()
        for expert in range(len(self._weight) if self._weight.ndim == 3 else 1):
            if expert not in self._packed:
                self._pack(expert)

    def forget(self) -> None:
        """Give the copy's memory back, until it is packed again."""
        self._packed.clear()

    def _forget_if_changed(self) -> None:
        if self._seen != (state := self._state()):
            self._packed.clear()
            self._seen = state

    def _pack(self, expert: int) -> torch.Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(self._matrix(expert).contiguous(), PACKED_FOR_ROWS)
        self._packed[expert] = packed
        return packed

    def _matrix(self, expert: int) -> torch.Tensor:
        weight = self._weight[expert] if self._weight.ndim == 3 else self._weight
        return weight.t() if self._is_transposed else weight

    def _state(self) -> tuple[int, int]:
        """Differs after every change in place and every change of memory."""
        return self._weight.data_ptr(), self._weight._version


def pack_experts(model: Any, required: bool = False) -> None:
    """Let the experts modules of `model` use packed weights: where the kernels exist and the copy takes at most half of
    the memory that is left. Says what it did.

    Raises:
        ValueError: it takes more, and is `required`, since engines that are to agree in every bit must choose alike.
    """
    modules = [module for module in model.modules() if is_experts(module)]
    weights = [weight for module in modules for weight in projections(module).values()]
    if not weights or not all(can_pack(weight) and _gains(weight) for weight in weights):
        return
    size, budget = sum(weight.nbytes for weight in weights), packing_budget(model)
    if size > budget:
        left = budget / MAX_SHARE_OF_MEMORY
        problem = (
            f"a copy of {size / 1e9:.1f} GB, packed for faster products, takes more than half of {left / 1e9:.1f} GB"
        )
        if required:
            raise ValueError(f"batch_invariant=True: {problem} that are left; use pack_weights=False in all engines")
        logger.warning("experts are not packed, and slower: %s that are left", problem)
        return
    for module in modules:
        named = projections(module).items()
        if not getattr(module, "packed_weights", None):
            module.packed_weights = {name: PackedWeight(weight, module.is_transposed) for name, weight in named}
    repack(model)
    logger.info("experts are packed for faster products: a second copy of %.2f GB", size / 1e9)


def repack(model: Any) -> None:
    """Pack what is not packed, or changed since."""
    for packed in _all_packed(model):
        packed.pack()


def forget_packed(model: Any) -> None:
    """Give the memory of all packed copies back, until they are packed again."""
    for packed in _all_packed(model):
        packed.forget()


def _all_packed(model: Any) -> list[PackedWeight]:
    return _packed_of(model.modules())


def _packed_of(modules: Iterable[Any]) -> list[PackedWeight]:
    return [packed for module in modules for packed in getattr(module, "packed_weights", {}).values()]


def packing_budget(model: Any) -> float:
    """Bytes that all packed copies of its weights may take: a share of the memory that is left without them."""
    return MAX_SHARE_OF_MEMORY * (available_bytes() + packed_bytes(model.modules()))


def packed_bytes(modules: Iterable[Any]) -> int:
    """That packed copies of weights of these modules take, in use or not."""
    return sum(packed.nbytes for packed in _packed_of(modules))


def packed_keep_bits(model: Any) -> bool:
    """Whether all experts are packed, and products of packed weights of their shapes keep a row's bits."""
    shapes = {packed.shape: packed for packed in _all_packed(model)}
    return bool(shapes) and all(packed.rows_keep_bits() for packed in shapes.values())


def projections(experts: Any) -> dict[str, torch.Tensor]:
    """The weights of an experts module by name: which it has depends on the family."""
    return {name: getattr(experts, name) for name in PROJECTIONS if getattr(experts, name, None) is not None}


def is_experts(module: Any) -> bool:
    """Whether a module's forward goes through transformers' experts interface."""
    return hasattr(module, "has_gate") and hasattr(module, "num_experts")


def can_pack(weight: Any) -> bool:
    """Whether there are kernels for it. A weight made in inference mode counts no changes."""
    if not isinstance(weight, torch.Tensor) or weight.device.type != "cpu" or weight.is_inference():
        return False
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _gains(weight: torch.Tensor) -> bool:
    return weight.dtype is not torch.float32 or weight[0].numel() >= MIN_FLOAT32_VALUES
