"""Trace <-> Arrow: fixed columns and bytes, exact round trips, zero-copy views."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from storage import FormatVersionError, RoutingSpec, Site, Trace, TraceDataset, TraceWriter, WeightSpan
from storage import arrays as storage_arrays
from storage.schema import COLUMNS, from_table, set_rewards, spec_of, table_problems, to_table, trace_schema
from storage.trace import OPTIONAL_LOGPROBS
from tests.storage.builders import SPEC, commit, make_trace, make_traces

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)
JSON = st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3) | st.booleans())
SPECS = (SPEC, RoutingSpec((Site("a", 0, 300, 2), Site("b", 2, 5, 1))))


@st.composite
def traces_of(draw: st.DrawFn, spec: RoutingSpec) -> Trace:
    """Any trace the contract allows: captured or not, partly valid, several weight versions, no completion."""
    prompt, completion = draw(TOKENS.filter(bool)), draw(TOKENS)
    reason = draw(st.sampled_from(["stop", "length", "abort"]))
    rows = len(prompt) + len(completion) - 1 if completion else len(prompt) * (reason != "abort")
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    start, cut = draw(st.integers(0, rows)), draw(st.integers(0, rows))
    captured = rows > 0 and draw(st.booleans())
    ids = np.stack([rng.integers(0, site.num_experts, (rows - start, spec.top_k)) for site in spec.sites], axis=1)
    for index, site in enumerate(spec.sites):
        ids[:, index, site.top_k :] = 0
    valid = rng.random(rows - start) < 0.7 if captured and draw(st.booleans()) else None
    if valid is not None:
        ids[~valid] = 0
    return Trace(
        sample_id=draw(st.text(min_size=1, max_size=5)),
        step=draw(st.integers(0, 2**40)),
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=-rng.random(len(completion)),
        raw_logprobs=draw(st.sampled_from([None, -rng.random(len(completion))])),
        routed_experts=ids.astype(spec.dtype) if captured else None,
        route_start=start if captured else 0,
        route_valid=valid,
        finish_reason=reason,
        weight_versions=[(3, 0, cut), (4, cut, rows)],
        stop_reason=draw(st.none() | st.integers(0, 99) | st.text(max_size=3)),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        sampling_params=draw(JSON),
        text=draw(st.none() | st.text(max_size=5)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        metadata=draw(JSON),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_trace_comes_back_as_it_was(data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from(SPECS))
    traces = data.draw(st.lists(traces_of(spec), max_size=5))
    table = to_table(traces, spec)
    assert from_table(table, check_crc=True) == traces
    assert table_problems(table) == []
    for trace, values in zip(traces, table.column("routed_experts").to_pylist(), strict=True):
        expected = trace.routed_experts
        assert values == (None if expected is None else [row.tobytes() for row in expected])


def test_one_row_value_by_value() -> None:
    spec = RoutingSpec.uniform(num_sites=1, num_experts=300, top_k=2)
    trace = Trace(
        sample_id="run/7/a/1",
        step=7,
        prompt_ids=[5, 7],
        completion_ids=[9, 2],
        logprobs=[-0.5, -0.25],
        routed_experts=np.array([[[1, 0]], [[2, 299]], [[3, 258]]]),
        finish_reason="stop",
        weight_versions=[WeightSpan(3, 0, 2), WeightSpan(4, 2, 3)],
        stop_reason=2,
        sampling_params={"temperature": 0.7},
    )
    hashed = struct.pack("<2i 2i 2f 6H", 5, 7, 9, 2, -0.5, -0.25, 1, 0, 2, 299, 3, 258)
    assert to_table([trace], spec).to_pylist() == [
        {
            "sample_id": "run/7/a/1",
            "group_id": "run/7/a",
            "step": 7,
            "prompt_ids": [5, 7],
            "completion_ids": [9, 2],
            "logprobs": [-0.5, -0.25],
            "raw_logprobs": None,
            "routed_experts": [b"\x01\x00\x00\x00", b"\x02\x00\x2b\x01", b"\x03\x00\x02\x01"],
            "route_start": 0,
            "route_valid": None,
            "weight_version": 4,
            "weight_versions": [
                {"version": 3, "row_start": 0, "row_end": 2},
                {"version": 4, "row_start": 2, "row_end": 3},
            ],
            "finish_reason": "stop",
            "stop_reason": "2",
            "seed": None,
            "sampling_params": '{"temperature": 0.7}',
            "text": None,
            "reward": None,
            "metadata": "{}",
            "error": None,
            "crc32": zlib.crc32(hashed),
        }
        | dict.fromkeys(OPTIONAL_LOGPROBS)
        | {"gate_weights": None, "model": None, "seconds": None}
    ]


def test_metadata_is_plain_and_fixed() -> None:
    assert trace_schema(SPEC).metadata == {
        b"moe_rollout.format_version": b"1",
        b"moe_rollout.routing_spec": SPEC.to_json().encode(),
    }
    assert spec_of(trace_schema(SPEC)) == SPEC


def test_views_share_the_tables_memory_and_are_read_only() -> None:
    table = to_table(make_traces(0), SPEC)
    buffer = table.column("routed_experts").chunk(0).values.buffers()[2]
    for trace in from_table(table):
        for array in (trace.routed_experts, trace.logprobs, trace.raw_logprobs):
            assert not array.flags.writeable
        assert np.shares_memory(trace.routed_experts, np.frombuffer(buffer, np.uint8))
        with pytest.raises(ValueError, match="read-only"):
            trace.routed_experts[0] = 1


def test_sliced_and_chunked_tables() -> None:
    traces = [*make_traces(0), make_trace(0, 9, routed_experts=None), *make_traces(1)]
    parts = [to_table(traces[:4], SPEC), to_table(traces[4:4], SPEC), to_table(traces[4:], SPEC)]
    table = pa.concat_tables(parts)
    for start in range(len(traces)):
        for length in (1, 4, 99):
            assert from_table(table.slice(start, length)) == traces[start : start + length]


def test_views_survive_ipc_without_a_copy() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, trace_schema(SPEC)) as stream:
        stream.write_table(to_table(make_traces(0), SPEC))
    message = sink.getvalue()
    traces = from_table(pa.ipc.open_stream(message).read_all())
    assert traces == make_traces(0)
    assert all(np.shares_memory(trace.routed_experts, np.frombuffer(message, np.uint8)) for trace in traces)


def test_a_table_that_went_through_polars() -> None:
    table = pl.from_arrow(to_table(make_traces(0), SPEC)).to_arrow()  # large_list, large_binary, no metadata
    with pytest.raises(FormatVersionError, match="replace_schema_metadata"):
        from_table(table)
    assert from_table(table.replace_schema_metadata(trace_schema(SPEC).metadata)) == make_traces(0)


def test_another_format_version_is_refused() -> None:
    table = to_table(make_traces(0), SPEC)
    newer = table.replace_schema_metadata(table.schema.metadata | {b"moe_rollout.format_version": b"2"})
    with pytest.raises(FormatVersionError, match="format_version '2', this release of moe-rollout reads '1'"):
        from_table(newer)


def test_missing_columns_are_named() -> None:
    table = to_table(make_traces(0), SPEC)
    with pytest.raises(ValueError, match=r"no \['logprobs', 'crc32'\]"):
        from_table(table.drop_columns(["crc32", "logprobs"]))
    assert from_table(table.select(COLUMNS[::-1])) == make_traces(0)


def test_a_row_of_the_wrong_width_is_refused() -> None:
    table = to_table([make_trace()], SPEC)
    wider = trace_schema(RoutingSpec.uniform(num_sites=3, num_experts=16, top_k=1)).metadata
    with pytest.raises(ValueError, match="not 3 bytes long"):
        from_table(table.replace_schema_metadata(wider))


def with_logprobs() -> Trace:
    """Three prompt and two completion tokens with everything optional, n = 2; -inf: filtered out."""
    return make_trace(
        completion=2,
        top_ids=[[4, 9], [0, 3]],
        top_logprobs=[[-0.5, -np.inf], [-0.25, -1.5]],
        raw_top_logprobs=[[-0.75, -2.0], [-0.5, -1.0]],
        prompt_logprobs=[-3.0, -4.0],
        raw_prompt_logprobs=[-3.5, -4.5],
        prompt_top_ids=[[7, 8], [5, 6]],
        prompt_top_logprobs=[[-0.1, -0.2], [-0.3, -0.4]],
        raw_prompt_top_logprobs=[[-0.5, -0.6], [-0.7, -0.8]],
    )


def test_optional_logprobs_come_back_in_their_shapes_beside_traces_without() -> None:
    traces = [with_logprobs(), make_trace(0, 1)]
    table = to_table(traces, SPEC)
    assert from_table(table, check_crc=True) == traces
    assert table["top_ids"].to_pylist() == [[4, 9, 0, 3], None]
    assert table["raw_prompt_logprobs"].to_pylist() == [[-3.5, -4.5], None]


def test_a_dataset_of_before_optional_logprobs_still_opens(tmp_path: Path) -> None:
    commit(tmp_path, 0)
    for path in tmp_path.rglob("*.parquet"):
        table = pq.read_table(path, partitioning=None)
        pq.write_table(table.drop_columns([*OPTIONAL_LOGPROBS, "gate_weights", "model", "seconds"]), path)
    dataset = TraceDataset(tmp_path)
    assert sorted(trace.sample_id for trace in dataset.iter()) == [trace.sample_id for trace in make_traces(0)]
    assert dataset.to_arrow()["top_ids"].null_count == len(dataset) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_ids": [[1]] * 4}, r"top_ids, top_logprobs, raw_top_logprobs have shapes \[\(4, 1\), None, None\]"),
        ({"prompt_logprobs": [0.0] * 3}, r"prompt_logprobs has shape \(3,\) for 3 prompt tokens, the first has none"),
    ],
)
def test_optional_logprobs_that_do_not_fit_are_refused_by_name(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"trace 'run/0/0/0': {message}"):
        make_trace(**fields)


@pytest.mark.parametrize("column", ["prompt_ids", "completion_ids", "logprobs", "raw_logprobs", "routed_experts"])
def test_the_crc_covers(column: str) -> None:
    mine, other = to_table([make_trace(0, 1)], SPEC), to_table([make_trace(0, 2)], SPEC)
    index = mine.column_names.index(column)
    mixed = mine.set_column(index, mine.field(index), other.column(column))
    assert table_problems(mixed) == ["trace 'run/0/1/0': its crc32 is not that of its tokens, logprobs and routes"]
    with pytest.raises(ValueError, match="crc32"):
        from_table(mixed, check_crc=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": [1, 2**31, 3]}, r"'run/0/0/0'.* in \[1, 2147483648\], need \[0, 2\*\*31\)"),
        ({"completion_ids": [1, -1, 3, 4]}, r"in \[-1, 4\]"),
        ({"metadata": {"a": np.float32(1)}}, "'run/0/0/0': metadata .* cannot be stored as JSON"),
        ({"sampling_params": {"a": float("nan")}}, "sampling_params .* cannot be stored as JSON"),
        ({"routed_experts": np.full((6, 3, 2), 16)}, r"site 0 \(site.0\) has an id"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_table([make_trace(0, 1), make_trace(**fields)], SPEC)


def test_a_trace_changed_after_it_was_made_is_checked_again() -> None:
    trace = make_trace()
    trace.completion_ids.append(3)
    with pytest.raises(ValueError, match="logprobs has shape"):
        to_table([trace], SPEC)


def test_more_than_an_arrow_array_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_arrays, "MAX_ARRAY_BYTES", 71)  # two traces of 6 rows of 6 bytes hold 72
    to_table([make_trace(0, 1)], SPEC)
    with pytest.raises(ValueError, match="2 traces hold 72 bytes of routes, an Arrow array holds 71"):
        to_table([make_trace(0, 1), make_trace(0, 2)], SPEC)


def test_set_rewards_fills_only_the_named() -> None:
    table = to_table([make_trace(0, 0), make_trace(0, 1, reward=2.0), make_trace(0, 2)], SPEC)
    rewarded = set_rewards(table, {"run/0/0/0": 0.5, "elsewhere": 9.0})
    assert rewarded.column("reward").to_pylist() == [0.5, 2.0, None]
    assert rewarded.schema.equals(table.schema, check_metadata=True)


def test_gate_weights_lie_beside_the_ids_as_float16(tmp_path: Path) -> None:
    gates = np.full((6, 3, 2), 0.5)
    gates[0, 0] = [0.25, 0.75]
    traces = [make_trace(0, 0, gate_weights=gates), make_trace(0, 1)]
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(traces, step=0)
        writer.commit(0)
    dataset = TraceDataset(tmp_path)
    assert (list(dataset), dataset.verify()) == (traces, [])
    read = dataset["run/0/0/0"].gate_weights
    assert (read.dtype, read.flags.writeable, read[0].tolist()) == (
        np.float16,
        False,
        [[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]],
    )
    # IEEE half precision, little-endian: 0.25 is 0x3400, 0.75 0x3a00, 0.5 0x3800
    stored = dataset.to_arrow(columns=["gate_weights"])["gate_weights"].to_pylist()
    assert (stored[0][0], stored[1]) == (b"\x00\x34\x00\x3a" + b"\x00\x38" * 4, None)
    with pytest.raises(ValueError, match=r"gate_weights has shape \(5, 3, 2\), need that of routed_experts, \(6,"):
        make_trace(0, 0, gate_weights=gates[1:])
