"""Ragged numpy rows <-> Arrow list columns. Reading never copies numbers; writing copies them once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from storage.trace import RoutingSpec

MAX_ARRAY_BYTES = 2**31 - 1  # offsets of Arrow's `list` and `binary` are int32


def list_array(rows: Sequence[np.ndarray | None], type_: pa.ListType) -> pa.ListArray:
    """One list per row, null for None. All elements are concatenated once."""
    present = [row for row in rows if row is not None]
    values = np.concatenate(present) if present else np.empty(0)
    return _lists(rows, pa.array(values, type_.value_type), type_)


def routes_array(
    rows: Sequence[np.ndarray | None], spec: RoutingSpec, type_: pa.ListType, dtype: np.dtype | None = None
) -> pa.ListArray:
    """One `list<binary>` per `[rows, sites, K]` array; each binary is one token's ids, or values of `dtype`."""
    dtype = dtype or wire_dtype(spec)
    row_bytes = spec.num_sites * spec.top_k * dtype.itemsize
    present = [row for row in rows if row is not None]
    total = sum(len(row) for row in present)
    _check_bytes(total * row_bytes, len(present))
    flat = np.concatenate([row.reshape(-1) for row in present]) if present else np.empty(0, dtype)
    offsets = np.arange(total + 1, dtype=np.int32) * np.int32(row_bytes)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(flat.astype(dtype, copy=False))]
    return _lists(rows, pa.Array.from_buffers(pa.binary(), total, buffers), type_)


def binary_lists(rows: Sequence[np.ndarray | None], type_: pa.ListType) -> pa.ListArray:
    """One `list<binary>` per array; its values are the bytes of `array[0]`, `array[1]`, ..."""
    present = [row for row in rows if row is not None]
    sizes = [np.full(len(row), row.nbytes // max(1, len(row)), np.int64) for row in present]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes]))])
    _check_bytes(int(offsets[-1]), len(present))
    flat = np.concatenate([np.empty(0, np.uint8), *(row.reshape(-1).view(np.uint8) for row in present)])
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(flat)]
    return _lists(rows, pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers), type_)


def value_views(column: pa.ListArray) -> Iterator[list[np.ndarray] | None]:
    """Read-only uint8 views of the values of each list of binaries; ValueError when one is null."""
    values, bounds = _values_and_bounds(column)
    if values.null_count:
        raise ValueError("a column of routes holds a null among the values of a list")
    _, offset_buffer, data = values.buffers()
    views: list[np.ndarray] = []
    if len(values):
        offsets = np.frombuffer(offset_buffer, np.int32)[values.offset : values.offset + len(values) + 1]
        flat = np.frombuffer(data, np.uint8) if offsets[-1] else np.empty(0, np.uint8)
        views = [flat[start:end] for start, end in pairwise(offsets.tolist())]
    for valid, start, end in zip(column.is_valid().to_pylist(), bounds[:-1], bounds[1:], strict=True):
        yield views[start:end] if valid else None


def _check_bytes(total: int, traces: int) -> None:
    if total > MAX_ARRAY_BYTES:
        raise ValueError(
            f"{traces} traces hold {total:,} bytes of routes, an Arrow array holds {MAX_ARRAY_BYTES:,}; encode fewer "
            "traces at a time"
        )


def _lists(rows: Sequence[np.ndarray | None], values: pa.Array, type_: pa.ListType) -> pa.ListArray:
    lengths = [0 if row is None else len(row) for row in rows]
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    nulls = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(offsets, values, type=type_, mask=nulls if any(nulls.to_pylist()) else None)


def list_views(column: pa.ListArray) -> Iterator[np.ndarray | None]:
    """Read-only views of the elements of each list (bools, which Arrow packs into bits, are copied)."""
    values, bounds = _values_and_bounds(column)
    flat = values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))
    flat.flags.writeable = False
    return _slices(column, flat, bounds)


def route_views(column: pa.ListArray, spec: RoutingSpec, dtype: np.dtype | None = None) -> Iterator[np.ndarray | None]:
    """Read-only `[rows, sites, K]` views of each list of binaries, as ids or values of `dtype`.

    Raises:
        ValueError: when a value does not have as many bytes as a row.
    """
    dtype = dtype or wire_dtype(spec)
    values, bounds = _values_and_bounds(column)
    flat = (
        _bytes_of(values, spec.num_sites * spec.top_k * dtype.itemsize)
        .view(dtype)
        .reshape(len(values), *spec.row_shape)
    )
    flat.flags.writeable = False
    return _slices(column, flat, bounds)


def _values_and_bounds(column: pa.ListArray) -> tuple[pa.Array, np.ndarray]:
    """The elements of a possibly sliced column, and where each list starts and ends among them."""
    if not len(column):
        return column.values.slice(0, 0), np.zeros(1, np.int32)
    offsets = column.offsets.to_numpy()
    return column.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]


def _slices(column: pa.ListArray, flat: np.ndarray, bounds: np.ndarray) -> Iterator[np.ndarray | None]:
    for valid, start, end in zip(column.is_valid().to_pylist(), bounds[:-1], bounds[1:], strict=True):
        yield flat[start:end] if valid else None


def _bytes_of(values: pa.BinaryArray, width: int) -> np.ndarray:
    if not len(values):
        return np.empty(0, np.uint8)
    _, offset_buffer, data = values.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[values.offset : values.offset + len(values) + 1]
    if values.null_count or (np.diff(offsets) != width).any():
        raise ValueError(f"a column of routes holds a value that is not {width} bytes long, as its spec demands")
    return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]]


def wire_dtype(spec: RoutingSpec) -> np.dtype:
    """`spec.dtype`, little-endian: how ids lie in files and buffers on every machine."""
    return spec.dtype.newbyteorder("<")
