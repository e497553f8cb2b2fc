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
from storage.errors import FormatVersionError, SpecMismatchError
from storage.trace import OPTIONAL_LOGPROBS, RoutingSpec, Trace, WeightSpan

FORMAT_VERSION = "1"
VERSION_KEY = b"moe_rollout.format_version"
SPEC_KEY = b"moe_rollout.routing_spec"
GATE_DTYPE = np.dtype("<f2")
_PER_TOKEN = ("routed_experts", "gate_weights")


def _list(element: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", element, nullable=False))


_SPAN = pa.struct(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("row_start", pa.int32(), nullable=False),
        pa.field("row_end", pa.int32(), nullable=False),
    ]
)
_FIELDS = (
    pa.field("sample_id", pa.string(), nullable=False),
    pa.field("group_id", pa.string(), nullable=False),
    pa.field("step", pa.int64(), nullable=False),
    pa.field("prompt_ids", _list(pa.int32()), nullable=False),
    pa.field("completion_ids", _list(pa.int32()), nullable=False),
    pa.field("logprobs", _list(pa.float32()), nullable=False),
    pa.field("raw_logprobs", _list(pa.float32())),
    pa.field("routed_experts", _list(pa.binary())),
    pa.field("route_start", pa.int32(), nullable=False),
    pa.field("route_valid", _list(pa.bool_())),
    pa.field("weight_version", pa.int64(), nullable=False),
    pa.field("weight_versions", _list(_SPAN), nullable=False),
    pa.field("finish_reason", pa.string(), nullable=False),
    pa.field("stop_reason", pa.string()),  # JSON text: 2 is a token id, "2" a stop string
    pa.field("seed", pa.int64()),
    pa.field("sampling_params", pa.string(), nullable=False),  # JSON text
    pa.field("text", pa.string()),
    pa.field("reward", pa.float64()),
    pa.field("metadata", pa.string(), nullable=False),  # JSON text
    pa.field("error", pa.string()),
    pa.field("crc32", pa.uint32(), nullable=False),
    *(pa.field(name, _list(pa.from_numpy_dtype(dtype))) for name, dtype in OPTIONAL_LOGPROBS.items()),
    pa.field("gate_weights", _list(pa.binary())),
    pa.field("model", pa.string()),
)
_REQUIRED_LISTS = ("prompt_ids", "completion_ids", "logprobs", "raw_logprobs", "routed_experts")
_CHECKSUMMED = (*_REQUIRED_LISTS, *OPTIONAL_LOGPROBS, "gate_weights")
_OPTIONAL = (*OPTIONAL_LOGPROBS, "gate_weights", "model")
_NUMPY_LISTS = (*_CHECKSUMMED, "route_valid")
COLUMNS = tuple(field.name for field in _FIELDS)


def trace_schema(spec: RoutingSpec, columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The Arrow schema of traces of `spec`, or some columns of it, with format version and spec in its metadata."""
    fields = {field.name: field for field in _FIELDS}
    chosen = [fields[name] for name in columns]
    return pa.schema(chosen, metadata={VERSION_KEY: FORMAT_VERSION, SPEC_KEY: spec.to_json()})


def spec_of(schema: pa.Schema) -> RoutingSpec:
    """The RoutingSpec in a schema's metadata; FormatVersionError if there is none this release reads."""
    metadata = schema.metadata or {}
    if VERSION_KEY not in metadata or SPEC_KEY not in metadata:
        raise FormatVersionError(
            f"the Arrow schema lacks {VERSION_KEY.decode()} and {SPEC_KEY.decode()} metadata: not written by "
            "moe-rollout, or lost on the way (restore it with table.replace_schema_metadata)"
        )
    check_version(metadata[VERSION_KEY].decode(), "the Arrow schema")
    return RoutingSpec.from_json(metadata[SPEC_KEY])


def check_version(version: Any, owner: str) -> None:
    """Raise FormatVersionError unless `version` is the one this release reads."""
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{owner} has format_version {version!r}, this release of moe-rollout reads {FORMAT_VERSION!r}; "
            "read it with the release that wrote it, or a newer one"
        )


def check_same_spec(given: RoutingSpec, expected: RoutingSpec, owner: str) -> None:
    """Raise SpecMismatchError, naming the first difference, unless `given` equals the spec of `owner`."""
    if given == expected:
        return
    difference = f"{expected.num_sites} sites, the given one {given.num_sites}"
    if given.num_sites == expected.num_sites:
        pairs = zip(expected.sites, given.sites, strict=True)
        index, old, new = next((i, old, new) for i, (old, new) in enumerate(pairs) if old != new)
        difference = f"at site {index} {old}, the given one {new}"
    raise SpecMismatchError(
        f"the routing spec of {owner} has {difference}; traces of another model need another dataset"
    )


def to_table(traces: Sequence[Trace], spec: RoutingSpec) -> pa.Table:
    """Encode traces, one row each, in the order given. Copies the routes once.

    Raises:
        ValueError: naming the sample, when its routes do not fit `spec`, a token id is no int32 or metadata
            is no JSON; also when the routes of all traces pass 2 GiB.
    """
    rows = [_row(trace, spec) for trace in traces]
    columns = [_column(field, [row[field.name] for row in rows], spec) for field in _FIELDS]
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
    return row | {"crc32": _crc32([row[column] for column in _CHECKSUMMED])}


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
    return list_array(values, field.type) if field.name in _NUMPY_LISTS else pa.array(values, field.type)


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


def table_problems(table: pa.Table) -> list[str]:
    """One text for each row with a wrong crc32, ids out of range, or values that contradict each other."""
    spec, table = spec_of(table.schema), conform(table)
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
    for name in _OPTIONAL:
        if name not in table.column_names:
            field = next(field for field in _FIELDS if field.name == name)
            table = table.append_column(field, pa.nulls(len(table), field.type))
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise ValueError(f"a trace needs every column, this table has no {missing}")
    schema = pa.schema(_FIELDS, metadata=table.schema.metadata)
    return table if table.schema.equals(schema) else table.select(COLUMNS).cast(schema)


def _rows(batch: pa.RecordBatch, spec: RoutingSpec) -> Iterator[dict[str, Any]]:
    scalars = batch.select([name for name in COLUMNS if name not in _NUMPY_LISTS]).to_pylist()
    views = {name: list_views(batch.column(name)) for name in _NUMPY_LISTS if name not in _PER_TOKEN}
    views["routed_experts"] = route_views(batch.column("routed_experts"), spec)
    views["gate_weights"] = route_views(batch.column("gate_weights"), spec, GATE_DTYPE)
    for row, *arrays in zip(scalars, *views.values(), strict=True):
        yield row | dict(zip(views, arrays, strict=True))


def _trace(row: dict[str, Any], check_crc: bool) -> Trace:
    if check_crc and row["crc32"] != _crc32([row[column] for column in _CHECKSUMMED]):
        raise ValueError(f"trace {row['sample_id']!r}: its crc32 is not that of its tokens, logprobs and routes")
    fields = {name: value for name, value in row.items() if name != "crc32"}
    for name in OPTIONAL_LOGPROBS:
        if "top" in name and row[name] is not None:
            rows = len(row["prompt_ids"]) - 1 if "prompt" in name else len(row["completion_ids"])
            fields[name] = row[name].reshape(rows, len(row[name]) // rows if rows else 0)
    return Trace(
        **fields
        | {
            "prompt_ids": row["prompt_ids"].tolist(),
            "completion_ids": row["completion_ids"].tolist(),
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
