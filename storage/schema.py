"""Trace <-> Arrow. The same columns in memory, in Parquet and over Ray; routes come back as zero-copy views.

One row per sample. `routed_experts` is `list<binary>`: one value per token, its sites * K little-endian ids.
The RoutingSpec travels as JSON in plain schema metadata: several readers refuse Arrow extension types.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.arrays import list_array, list_views, route_views, routes_array
from storage.columns import (
    CHECKSUMMED,
    COLUMNS,
    FIELDS,
    FORMAT_VERSION,
    GATE_DTYPE,
    NUMPY_LISTS,
    OPTIONAL,
    PER_TOKEN,
    SCHEMA,
    SPEC_KEY,
    VERSION_KEY,
    check_same_spec,
    check_version,
    spec_of,
    trace_schema,
)
from storage.trace import OPTIONAL_LOGPROBS, RoutingSpec, Trace, WeightSpan

__all__ = [
    "COLUMNS",
    "FORMAT_VERSION",
    "GATE_DTYPE",
    "SPEC_KEY",
    "VERSION_KEY",
    "check_same_spec",
    "check_version",
    "conform",
    "from_table",
    "set_rewards",
    "spec_of",
    "table_problems",
    "to_table",
    "trace_schema",
]


def to_table(traces: Sequence[Trace], spec: RoutingSpec) -> pa.Table:
    """Encode traces, one row each, in the order given. Copies the routes once.

    Raises:
        ValueError: naming the sample, when its routes do not fit `spec`, a token id is no int32 or metadata
            is no JSON; also when the routes of all traces pass 2 GiB.
    """
    rows = [_row(trace, spec) for trace in traces]
    columns = [_column(field, [row[field.name] for row in rows], spec) for field in FIELDS]
    return pa.Table.from_arrays(columns, schema=trace_schema(spec))


def _row(trace: Trace, spec: RoutingSpec) -> dict[str, Any]:
    trace.check()  # fields may have been assigned since
    name, routes = f"trace {trace.sample_id!r}", trace.routed_experts
    optional = {name: getattr(trace, name) for name in OPTIONAL_LOGPROBS}
    row = {column: getattr(trace, column) for column in COLUMNS if column != "crc32"} | {
        **{name: None if values is None else values.reshape(-1) for name, values in optional.items()},
        "prompt_ids": _token_array(trace.prompt_ids, name),
        "completion_ids": _token_array(trace.completion_ids, name),
        "routed_experts": None if routes is None else spec.check_routes(routes, name=name),
        "weight_versions": [span._asdict() for span in trace.weight_versions],
        "stop_reason": None if trace.stop_reason is None else _json(trace.stop_reason, f"{name}: stop_reason"),
        "sampling_params": _json(trace.sampling_params, f"{name}: sampling_params"),
        "metadata": _json(trace.metadata, f"{name}: metadata"),
    }
    return row | {"crc32": _crc32([row[column] for column in CHECKSUMMED])}


def _token_array(ids: list[int], name: str) -> np.ndarray:
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        raise ValueError(f"{name}: token ids are in [{min(ids)}, {max(ids)}], need [0, 2**31)")
    return np.array(ids, np.int32)


def _json(value: Any, name: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {value!r} cannot be stored as JSON: {error}") from error


def _column(field: pa.Field, values: list[Any], spec: RoutingSpec) -> pa.Array:
    if field.name == "routed_experts":
        return routes_array(values, spec, field.type)
    if field.name == "gate_weights":
        return routes_array(values, spec, field.type, GATE_DTYPE)
    return list_array(values, field.type) if field.name in NUMPY_LISTS else pa.array(values, field.type)


def _crc32(arrays: Sequence[np.ndarray | None]) -> int:
    crc = 0
    for array in arrays:
        if array is not None:
            little_endian = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            crc = zlib.crc32(little_endian.data, crc)
    return crc


def from_table(table: pa.Table, *, check_crc: bool = False) -> list[Trace]:
    """Decode every row; routes and logprobs are read-only views of the table's buffers.

    Raises:
        FormatVersionError: when the metadata is missing or of another version.
        ValueError: naming the columns that are missing, or the sample whose values contradict each other or,
            with `check_crc`, its crc32.
    """
    spec, table = spec_of(table.schema), conform(table)
    return [_trace(row, check_crc) for batch in table.to_batches() for row in _rows(batch, spec)]


def table_problems(table: pa.Table, spec: RoutingSpec | None = None) -> list[str]:
    """One text for each row with a wrong crc32, ids out of range, or values that contradict each other.

    `spec` is the table's, for a caller that knows it already.
    """
    spec, table = spec or spec_of(table.schema), conform(table)
    found = (_row_problem(row, spec) for batch in table.to_batches() for row in _rows(batch, spec))
    return [problem for problem in found if problem]


def _row_problem(row: dict[str, Any], spec: RoutingSpec) -> str | None:
    try:
        routes = _trace(row, check_crc=True).routed_experts
        if routes is not None:
            spec.check_routes(routes, name=f"trace {row['sample_id']!r}")
    except ValueError as error:
        return str(error)
    return None


def conform(table: pa.Table) -> pa.Table:
    """`table` in the contract's column order and types; ValueError when a column is missing or unfit.

    Optional columns that a table written before they existed does not have are null.
    """
    if table.schema.equals(SCHEMA):
        return table
    for name in OPTIONAL:
        if name not in table.column_names:
            field = next(field for field in FIELDS if field.name == name)
            table = table.append_column(field, pa.nulls(len(table), field.type))
    present = set(table.column_names)
    missing = [name for name in COLUMNS if name not in present]
    if missing:
        raise ValueError(f"a trace needs every column, this table has no {missing}")
    return table.select(COLUMNS).cast(SCHEMA.with_metadata(table.schema.metadata))


def _rows(batch: pa.RecordBatch, spec: RoutingSpec) -> Iterator[dict[str, Any]]:
    scalars = batch.select([name for name in COLUMNS if name not in NUMPY_LISTS]).to_pylist()
    views = {name: list_views(batch.column(name)) for name in NUMPY_LISTS if name not in PER_TOKEN}
    views["routed_experts"] = route_views(batch.column("routed_experts"), spec)
    views["gate_weights"] = route_views(batch.column("gate_weights"), spec, GATE_DTYPE)
    for row, *arrays in zip(scalars, *views.values(), strict=True):
        yield row | dict(zip(views, arrays, strict=True))


def _trace(row: dict[str, Any], check_crc: bool) -> Trace:
    if check_crc and row["crc32"] != _crc32([row[column] for column in CHECKSUMMED]):
        raise ValueError(f"trace {row['sample_id']!r}: its crc32 is not that of its tokens, logprobs and routes")
    fields = {name: value for name, value in row.items() if name != "crc32"}
    for name in OPTIONAL_LOGPROBS:
        if "top" in name and row[name] is not None:
            rows = len(row["prompt_ids"]) - 1 if "prompt" in name else len(row["completion_ids"])
            fields[name] = row[name].reshape(rows, len(row[name]) // rows if rows else 0)
    return Trace(
        **fields
        | {
            "weight_versions": [WeightSpan(**span) for span in row["weight_versions"]],
            "stop_reason": None if row["stop_reason"] is None else json.loads(row["stop_reason"]),
            "sampling_params": json.loads(row["sampling_params"]),
            "metadata": json.loads(row["metadata"]),
        }
    )


def set_rewards(table: pa.Table, rewards: Mapping[str, float]) -> pa.Table:
    """`table` with the reward of every sample_id in `rewards` filled in; other rows keep theirs.

    >>> set_rewards(table, {"run/0/0-0/0": 1.0}).column("reward").to_pylist()
    [1.0, None]
    """
    pairs = zip(table.column("sample_id").to_pylist(), table.column("reward").to_pylist(), strict=True)
    values = pa.array([rewards.get(sample_id, reward) for sample_id, reward in pairs], pa.float64())
    index = table.column_names.index("reward")
    return table.set_column(index, table.field(index), values)
