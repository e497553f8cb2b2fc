"""kernels.cpp, compiled by the machine's C++ compiler when the first engine of a process starts: under a second.

Torch's kernels for a few rows read weights and keys at a third to a half of the speed of memory; these come near it.
They are called through ctypes, which releases the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILE = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-std=c++17", "-fPIC", "-fopenmp", "-c")
COMPILE_TIMEOUT_S = 120
LANES = 16
LINE_BYTES = 64
DTYPES = (torch.float32, torch.bfloat16)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_LINEAR = [_POINTER] * 6 + [_INT] * 3 + [ctypes.c_int]
_SUM = [_POINTER] * 4 + [_INT] * 3 + [ctypes.c_int]
_ATTENTION = [_POINTER] * 6 + [_INT] * 5 + [ctypes.c_float, _POINTER, _INT, ctypes.c_int]


class NativeKernelsError(RuntimeError):
    """There is no working C++ compiler, or what it made cannot be loaded."""


class NativeKernels:
    """The functions of kernels.cpp over torch tensors on the CPU.

    Attributes:
        num_threads: in which they compute; their results do not depend on it.
    """

    def __init__(self, library: ctypes.CDLL, num_threads: int = 1) -> None:
        self.num_threads = num_threads
        self._sum = {dtype: _function(library, "weighted_sum", dtype, _SUM) for dtype in DTYPES}
        self._linear = {dtype: _function(library, "grouped_linear", dtype, _LINEAR) for dtype in DTYPES}
        self._attention = {dtype: _function(library, "attention", dtype, _ATTENTION) for dtype in DTYPES}

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
            ValueError: `rows` have another dtype.
        """
        if rows.dtype is not weight.dtype:
            raise ValueError(f"rows of {rows.dtype} for weights of {weight.dtype}")
        rows = rows.contiguous()
        _, outputs, inputs = weight.shape
        pointers = (t.data_ptr() for t in (rows, weight, out, experts, starts, heights))
        self._linear[weight.dtype](*pointers, len(experts), inputs, outputs, self.num_threads)

    def weighted_sum(self, rows: torch.Tensor, where: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[tokens, width]`: for each token the sum of `rows[where]` times `weights`.

        Args:
            rows: `[N, width]`, that `fit_sum`.
            where: int64 `[tokens * slots]`, contiguous.
            weights: `[tokens, slots]`.
        """
        tokens, slots = weights.shape
        weights = weights.float().contiguous()
        out = rows.new_empty(tokens, rows.shape[1])
        pointers = (t.data_ptr() for t in (rows, where, weights, out))
        self._sum[rows.dtype](*pointers, tokens, slots, rows.shape[1], self.num_threads)
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
    ) -> torch.Tensor:
        """Each query over keys in consecutive slots: `[tokens, heads, value_dim]`.

        Args:
            queries: `[tokens, heads, key_dim]`.
            keys: `[slots, kv_heads, key_dim]`, and `values` `[slots, kv_heads, value_dim]`, that `fit_attention`.
            first: int64 `[tokens]`, a query's first slot; `lens`: int64 `[tokens]`, its number of keys, at least 1.
            longest: the largest of `lens`.
            scale: of the scores; None is `1 / sqrt(key_dim)`.
        """
        tokens, heads, key_dim = queries.shape
        kv_heads, value_dim = values.shape[1:]
        queries = queries.float().contiguous()
        out = values.new_empty(tokens, heads, value_dim)
        threads = min(self.num_threads, tokens * kv_heads)
        scratch = torch.empty(threads, heads * (longest + LANES + value_dim))
        pointers = (t.data_ptr() for t in (queries, keys, values, out, first, lens))
        sizes = tokens, kv_heads, heads // kv_heads, key_dim, value_dim
        scale = key_dim**-0.5 if scale is None else scale
        self._attention[keys.dtype](*pointers, *sizes, scale, scratch.data_ptr(), scratch.shape[1], threads)
        return out


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
    """Whether `grouped_linear` takes `[experts, out, in]` weights."""
    return _is_plain(weight) and weight.shape[-1] * weight.itemsize % LINE_BYTES == 0


def fit_sum(rows: torch.Tensor) -> bool:
    """Whether `weighted_sum` takes them."""
    return _fills_vectors(rows)


def fit_attention(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `attention` takes them."""
    return keys.dtype is values.dtype and _fills_vectors(keys) and _fills_vectors(values)


def _fills_vectors(tensor: torch.Tensor) -> bool:
    return _is_plain(tensor) and tensor.shape[-1] % LANES == 0


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in DTYPES and tensor.is_contiguous()


@functools.cache
def load_library() -> ctypes.CDLL:
    """Compile, once per process, in a temporary directory that is removed again. `CXX` names another compiler.

    Raises:
        NativeKernelsError: what the compiler or the loader said.
    """
    compiler = (os.environ.get("CXX") or "c++").split()
    try:
        with tempfile.TemporaryDirectory(prefix="moe-rollout-", ignore_cleanup_errors=True) as directory:
            code, library = f"{directory}/kernels.o", f"{directory}/kernels.so"
            _run([*compiler, *COMPILE, str(SOURCE), "-o", code])
            _run([*compiler, "-shared", code, "-o", library])  # no OpenMP library of its own: torch's, and its threads
            return ctypes.CDLL(library)
    except OSError as error:
        raise NativeKernelsError(f"the kernels cannot be made or loaded: {error}; see TMPDIR") from error


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise NativeKernelsError(f"`{' '.join(command)}` failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeKernelsError(f"no C++ compiler: {error}; install one, or name it in CXX") from error


def _function(library: ctypes.CDLL, name: str, dtype: torch.dtype, arguments: Sequence[type]) -> Any:
    function = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}")
    function.argtypes, function.restype = arguments, None
    return function
