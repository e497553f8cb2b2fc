"""The columns of a trace in Arrow and Parquet, and what each schema says of itself: format version and spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.errors import FormatVersionError, SpecMismatchError
from storage.trace import OPTIONAL_LOGPROBS, RoutingSpec

FORMAT_VERSION = "1"
VERSION_KEY = b"moe_rollout.format_version"
SPEC_KEY = b"moe_rollout.routing_spec"
GATE_DTYPE = np.dtype("<f2")
PER_TOKEN = ("routed_experts", "gate_weights")


def _list(element: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", element, nullable=False))


_SPAN = pa.struct(
    [
        pa.field("version", pa.int64(), nullable=False),
        pa.field("row_start", pa.int32(), nullable=False),
        pa.field("row_end", pa.int32(), nullable=False),
    ]
)
FIELDS = (
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
    pa.field("seconds", pa.float32()),
)
_REQUIRED_LISTS = ("prompt_ids", "completion_ids", "logprobs", "raw_logprobs", "routed_experts")
CHECKSUMMED = (*_REQUIRED_LISTS, *OPTIONAL_LOGPROBS, "gate_weights")
OPTIONAL = (*OPTIONAL_LOGPROBS, "gate_weights", "model", "seconds")
NUMPY_LISTS = (*CHECKSUMMED, "route_valid")
SCHEMA = pa.schema(FIELDS)
COLUMNS = tuple(field.name for field in FIELDS)


def trace_schema(spec: RoutingSpec, columns: Sequence[str] = COLUMNS) -> pa.Schema:
    """The Arrow schema of traces of `spec`, or some columns of it, with format version and spec in its metadata."""
    fields = {field.name: field for field in FIELDS}
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
