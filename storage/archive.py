"""The archive layout of cold data: the ids of one router lie side by side, and zstd works harder (storage/compact.py).

A file of this layout has `routed_experts_by_site` and `gate_weights_by_site` where others have `routed_experts` and
`gate_weights`: also `list<binary>`, but one value per site, its `rows * K` ids. Other names, so that no other program
can take one for the other; `moe_rollout.layout` in the schema metadata says `archive`.
Readers of this package turn the columns back, so nobody above `storage.part_reader` sees which layout was read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from storage.arrays import binary_lists, route_views, routes_array, value_views, wire_dtype
from storage.columns import GATE_DTYPE, PER_TOKEN, trace_schema
from storage.errors import FormatVersionError
from storage.trace import RoutingSpec

LAYOUT_KEY = b"moe_rollout.layout"
ARCHIVE = "archive"
ARCHIVE_LEVEL = 3  # of zstd
_STORED = {name: f"{name}_by_site" for name in PER_TOKEN}


def archive_schema(spec: RoutingSpec) -> pa.Schema:
    """`trace_schema(spec)` with the two columns per site, and the layout in the metadata."""
    schema = trace_schema(spec)
    fields = [field.with_name(_STORED.get(field.name, field.name)) for field in schema]
    return pa.schema(fields, metadata={**schema.metadata, LAYOUT_KEY: ARCHIVE})


def is_archived(schema: pa.Schema) -> bool:
    """Whether a file with this schema has the archive layout; FormatVersionError when it has one unknown here."""
    layout = (schema.metadata or {}).get(LAYOUT_KEY)
    if layout not in (None, ARCHIVE.encode()):
        raise FormatVersionError(
            f"the Arrow schema has layout {layout.decode(errors='replace')!r}, this release of moe-rollout reads "
            f"{ARCHIVE!r} or none; read it with the release that wrote it, or a newer one"
        )
    return layout is not None


def stored_names(columns: Sequence[str]) -> list[str]:
    """What these columns of a trace are called in an archive.

    >>> stored_names(["sample_id", "routed_experts"])
    ['sample_id', 'routed_experts_by_site']
    """
    return [_STORED.get(name, name) for name in columns]


def to_archive(table: pa.Table, spec: RoutingSpec) -> pa.Table:
    """`table` of `trace_schema(spec)` in the archive layout; copies the routes once."""
    for name, dtype in _dtypes(spec).items():
        index = table.column_names.index(name)
        rows = [
            None if row is None else np.ascontiguousarray(row.transpose(1, 0, 2))
            for chunk in table.column(index).chunks
            for row in route_views(chunk, spec, dtype)
        ]
        field = table.field(index)
        table = table.set_column(index, field.with_name(_STORED[name]), binary_lists(rows, field.type))
    return table.replace_schema_metadata(archive_schema(spec).metadata)


def from_archive(table: pa.Table, spec: RoutingSpec) -> pa.Table:
    """Inverse of `to_archive`, also for a table with some of the columns.

    Raises:
        ValueError: when a list has not one value per site, or values that differ in length or hold no whole rows.
    """
    for name, dtype in _dtypes(spec).items():
        if _STORED[name] in table.column_names:
            index = table.column_names.index(_STORED[name])
            lists = (values for chunk in table.column(index).chunks for values in value_views(chunk))
            rows = [None if values is None else _token_major(values, spec, dtype) for values in lists]
            field = table.field(index)
            table = table.set_column(index, field.with_name(name), routes_array(rows, spec, field.type, dtype))
    return table.replace_schema_metadata(trace_schema(spec).metadata)


def _dtypes(spec: RoutingSpec) -> dict[str, np.dtype]:
    return {"routed_experts": wire_dtype(spec), "gate_weights": GATE_DTYPE}


def _token_major(values: list[np.ndarray], spec: RoutingSpec, dtype: np.dtype) -> np.ndarray:
    sizes = {value.nbytes for value in values}
    if len(values) != spec.num_sites or len(sizes) != 1 or sizes.pop() % (spec.top_k * dtype.itemsize):
        raise ValueError(
            f"an archived list of routes has {len(values)} values, of {[value.nbytes for value in values][:4]} bytes, "
            f"need {spec.num_sites} of equal length, in rows of {spec.top_k * dtype.itemsize} bytes"
        )
    by_site = np.concatenate(values).view(dtype).reshape(spec.num_sites, -1, spec.top_k)
    return np.ascontiguousarray(by_site.transpose(1, 0, 2))
