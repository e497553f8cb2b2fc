"""The functions of kernels.cpp over torch tensors.

Torch's kernels for a few rows read weights and keys at a third to a half of the speed of memory; these come near it.
One call stands for many short operations, and is made through ctypes, which releases the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch

from rollout.native_build import NativeKernelsError, load_library

logger = logging.getLogger(__name__)
LANES = 16
LINE_BYTES = 64
MIN_SHARED_VALUES = 1 << 17  # fewer take less time than waking a thread
DTYPES = (torch.float32, torch.bfloat16)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_LINEAR = [_POINTER] * 3 + [_INT] * 3 + [ctypes.c_int]
_GROUPED = [_POINTER] * 6 + [_INT] * 3 + [ctypes.c_int]
_SUM = [_POINTER] * 4 + [_INT] * 3 + [ctypes.c_int]
_EXPERTS = [_POINTER] * 8 + [_INT] * 6 + [ctypes.c_int]
_NORM = [_POINTER] * 3 + [_INT] * 2 + [ctypes.c_float, ctypes.c_int]
_ATTENTION = [_POINTER] * 6 + [_INT] * 5 + [ctypes.c_float, _POINTER, _INT, ctypes.c_int]


class NativeKernels:
    """The functions of kernels.cpp over torch tensors on the CPU.

    Attributes:
        num_threads: in which they compute; their results do not depend on it.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self._sum = {dtype: _function(library, "weighted_sum", dtype, _SUM) for dtype in DTYPES}
        self._linear = {dtype: _function(library, "linear", dtype, _LINEAR) for dtype in DTYPES}
        self._grouped = {dtype: _function(library, "grouped_linear", dtype, _GROUPED) for dtype in DTYPES}
        self._experts = {dtype: _function(library, "gated_experts", dtype, _EXPERTS, ctypes.c_bool) for dtype in DTYPES}
        self._norm = {dtype: _function(library, "rms_norm", dtype, _NORM) for dtype in DTYPES}
        self._attention = {dtype: _function(library, "attention", dtype, _ATTENTION) for dtype in DTYPES}

    def linear(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`rows @ weight.T`: of `[N, in]`, and a weight `[out, in]` of their dtype that `fits`."""
        rows = rows.contiguous()
        outputs, inputs = weight.shape
        out = rows.new_empty(len(rows), outputs)
        pointers = rows.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._linear[weight.dtype](*pointers, len(rows), inputs, outputs, self.num_threads)
        return out

    def grouped_linear(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        experts: torch.Tensor,
        starts: torch.Tensor,
        heights: torch.Tensor,
    ) -> None:
        """For each of `experts`, write `rows[start : start + height] @ weight[expert].T` into the same rows of `out`.

        Args:
            rows: `[N, in]`, of the weight's dtype.
            weight: `[experts, out, in]`, one that `fits`.
            out: `[N, out]`, contiguous.
            experts: int64 `[groups]`, as are `starts` and `heights`.

        Raises:
            ValueError: `rows` have another dtype or width.
        """
        if rows.dtype is not weight.dtype or rows.shape[-1] != weight.shape[-1]:
            raise ValueError(f"rows of {rows.shape[-1]} {rows.dtype} for weights of {weight.shape[-1]} {weight.dtype}")
        rows = rows.contiguous()
        _, outputs, inputs = weight.shape
        pointers = (t.data_ptr() for t in (rows, weight, out, experts, starts, heights))
        self._grouped[weight.dtype](*pointers, len(experts), inputs, outputs, self.num_threads)

    def weighted_sum(self, rows: torch.Tensor, where: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[tokens, width]`: for each token the sum of `rows[where]` times `weights`.

        Args:
            rows: `[N, width]`, that `fit_vectors`.
            where: int64 `[tokens * slots]`, contiguous.
            weights: `[tokens, slots]`.
        """
        tokens, slots = weights.shape
        weights = weights.float().contiguous()
        out = rows.new_empty(tokens, rows.shape[1])
        pointers = (t.data_ptr() for t in (rows, where, weights, out))
        self._sum[rows.dtype](*pointers, tokens, slots, rows.shape[1], self.num_threads)
        return out

    def gated_experts(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        most_rows: int,
    ) -> torch.Tensor | None:
        """`[tokens, hidden]` of an experts module, or None if an expert has more than `most_rows`, or an id is none's.

        Args:
            hidden: `[tokens, hidden]`, of the weights' dtype.
            ids: `[tokens, slots]`, as are `weights`.
            gate_up: `[experts, 2 * inner, hidden]`, and `down` `[experts, hidden, inner]`, that `fits`.
        """
        (tokens, slots), (experts, hidden_size, inner) = ids.shape, down.shape
        if tokens * slots > experts * most_rows:
            return None
        hidden, ids, weights = hidden.contiguous(), ids.long().contiguous(), weights.float().contiguous()
        out = torch.empty_like(hidden)
        plan = torch.empty(4 * experts + tokens * slots, dtype=torch.int64)
        scratch = hidden.new_empty(tokens * slots * (hidden_size + 2 * inner))
        pointers = (t.data_ptr() for t in (hidden, ids, weights, gate_up, down, out, plan, scratch))
        sizes = tokens, slots, experts, hidden_size, inner, most_rows
        return out if self._experts[hidden.dtype](*pointers, *sizes, self.num_threads) else None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`weight * (x / sqrt(mean(x * x) + eps))` over the last dimension of a contiguous `x` of that dtype."""
        out = torch.empty_like(x)
        width = weight.shape[0]
        pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        threads = self.num_threads if x.numel() >= MIN_SHARED_VALUES else 1
        self._norm[x.dtype](*pointers, x.numel() // width, width, eps, threads)
        return out

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        first: torch.Tensor,
        lens: torch.Tensor,
        longest: int,
        scale: float | None,
        out: torch.Tensor,
    ) -> None:
        """Each query over keys in consecutive slots.

        Args:
            queries: `[tokens, heads, key_dim]`.
            keys: `[slots, kv_heads, key_dim]`, and `values` `[slots, kv_heads, value_dim]`, that `fit_attention`.
            first: int64 `[tokens]`, a query's first slot; `lens`: int64 `[tokens]`, its number of keys, at least 1.
            longest: the largest of `lens`.
            scale: of the scores; None is `1 / sqrt(key_dim)`.
            out: `[tokens, heads, value_dim]`, contiguous, of the values' dtype; what it holds is overwritten.
        """
        tokens, heads, key_dim = queries.shape
        kv_heads, value_dim = values.shape[1:]
        queries = queries.float().contiguous()
        threads = min(self.num_threads, tokens * kv_heads)
        scratch = torch.empty(threads, heads * (longest + LANES + value_dim))
        pointers = (t.data_ptr() for t in (queries, keys, values, out, first, lens))
        sizes = tokens, kv_heads, heads // kv_heads, key_dim, value_dim
        scale = key_dim**-0.5 if scale is None else scale
        self._attention[keys.dtype](*pointers, *sizes, scale, scratch.data_ptr(), scratch.shape[1], threads)


def choose_native(
    setting: bool | Literal["auto"], device: torch.device, num_threads: int, alike: str = ""
) -> NativeKernels | None:
    """The kernels for an engine on `device`, or None; see EngineOptions.native_kernels. `alike` names the option, if
    there is one, for which engines must choose alike.

    Raises:
        ValueError: they are asked for and cannot be had.
    """
    if setting is False or (device.type != "cpu" and setting == "auto"):
        return None
    if device.type != "cpu":
        raise ValueError(f"native_kernels=True is not available on device {str(device)!r}; use 'auto'")
    try:
        return NativeKernels(load_library(), num_threads)
    except NativeKernelsError as error:
        if setting == "auto" and not alike:
            logger.warning("no native kernels, and steps are slower: %s", error)
            return None
        asked = "native_kernels=True" if setting is True else f"{alike}, for which all engines must compute alike"
        raise ValueError(f"{asked}: {error}. Or use native_kernels=False in all of them") from error


def fits(weight: torch.Tensor) -> bool:
    """Whether `linear` takes an `[out, in]` weight, `grouped_linear` and `gated_experts` `[experts, out, in]` ones."""
    return _is_plain(weight) and weight.shape[-1] * weight.itemsize % LINE_BYTES == 0


def fit_vectors(rows: torch.Tensor) -> bool:
    """Whether `weighted_sum` takes rows, and `rms_norm` a weight."""
    return _is_plain(rows) and rows.shape[-1] % LANES == 0


def fit_attention(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `attention` takes them."""
    return keys.dtype is values.dtype and fit_vectors(keys) and fit_vectors(values)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES and tensor.is_contiguous()


def _function(
    library: ctypes.CDLL, name: str, dtype: torch.dtype, arguments: Sequence[type], result: type | None = None
) -> Any:
    function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
    function.argtypes, function.restype = arguments, result
    return function
