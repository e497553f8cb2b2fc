"""The route contract: RoutingSpec fixes the shape, Trace refuses what contradicts it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import duckdb
import numpy as np
import pytest

from storage import RoutingSpec, Site, TraceDataset, TraceWriter, WeightSpan
from storage.trace import expected_rows
from tests.storage.builders import SPEC, make_trace
from tests.storage.toy import LONG_IDS, TOY, holed_trace, long_trace, short_trace, toy_trace


@pytest.mark.parametrize(("num_experts", "dtype", "row_bytes"), [(256, np.uint8, 6), (257, np.uint16, 12)])
def test_dtype_follows_the_spec(num_experts: int, dtype: type, row_bytes: int) -> None:
    spec = RoutingSpec.uniform(num_sites=3, num_experts=num_experts, top_k=2)
    assert spec.dtype == dtype
    assert spec.row_bytes == row_bytes


def test_dtype_never_follows_the_data() -> None:
    spec = RoutingSpec.uniform(num_sites=1, num_experts=512, top_k=1)
    assert spec.check_routes(np.zeros((4, 1, 1), np.uint8), name="t").dtype == np.uint16


def test_json_text_is_fixed() -> None:
    spec = RoutingSpec((Site("model.layers.1.mlp.gate", 1, 16, 2),))
    text = '{"sites":[{"name":"model.layers.1.mlp.gate","layer":1,"num_experts":16,"top_k":2}]}'
    assert spec.to_json() == text
    assert RoutingSpec.from_json(text) == spec


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sites":[{"name":"a"}]}', '{"sites":[]}'])
def test_from_json_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="RoutingSpec"):
        RoutingSpec.from_json(text)


def test_check_routes_names_sample_site_and_ids() -> None:
    routes = np.zeros((4, 3, 2), np.int64)
    routes[2, 1, 0] = 16
    with pytest.raises(ValueError, match=r"trace 'a': site 1 \(site\.1\) has an id in \[0, 16\], need \[0, 16\)"):
        SPEC.check_routes(routes, name="trace 'a'")


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.full((1, 3, 2), -1), r"id in \[-1, -1\]"),
        (np.zeros((1, 2, 2), int), r"shape \(1, 2, 2\), need \[rows, 3, 2\]"),
        (np.zeros((1, 3, 2), np.float32), "is float32, need integers"),
    ],
)
def test_check_routes_refuses(routes: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SPEC.check_routes(routes, name="t")


def test_unused_slots_of_a_narrow_site_must_be_zero() -> None:
    spec = RoutingSpec((Site("a", 0, 8, 2), Site("b", 1, 4, 1)))
    assert spec.row_shape == (2, 2)
    spec.check_routes(np.array([[[7, 3], [3, 0]]]), name="t")
    with pytest.raises(ValueError, match=r"site 1 \(b\) uses 1 of 2 slots"):
        spec.check_routes(np.array([[[7, 3], [3, 1]]]), name="t")


@pytest.mark.parametrize(
    ("prompt", "completion", "reason", "rows"),
    [(5, 3, "stop", 7), (1, 1, "length", 1), (5, 0, "length", 5), (5, 2, "abort", 6), (5, 0, "abort", 0)],
)
def test_row_rule(prompt: int, completion: int, reason: str, rows: int) -> None:
    assert expected_rows(prompt, completion, reason) == rows


def test_defaults() -> None:
    trace = make_trace(sample_id="run/0/7-1/3", weight_version=5)
    assert trace.group_id == "run/0/7-1"
    assert trace.weight_versions == [WeightSpan(5, 0, 6)]
    assert trace.token_ids == trace.prompt_ids + trace.completion_ids
    assert trace.logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sample_id": ""}, "needs a sample_id"),
        ({"finish_reason": "eos"}, "finish_reason 'eos'"),
        ({"logprobs": [0.0]}, r"logprobs has shape \(1,\) for 4 completion tokens"),
        ({"routed_experts": np.zeros((7, 3, 2), int)}, r"rows 0\.\.7 for 7 tokens; the rows must end at 6"),
        ({"routed_experts": np.zeros((6, 3, 2), int), "route_start": 1}, r"rows 1\.\.7"),
        ({"routed_experts": np.zeros((6, 6), int)}, r"need integers \[rows, sites, K\]"),
        ({"route_valid": [True]}, r"route_valid has shape \(1,\) for 6 rows"),
        ({"routed_experts": np.ones((6, 3, 2), int), "route_valid": [True] * 5 + [False]}, "is not zero"),
        ({"routed_experts": None, "route_valid": [True]}, "no routed_experts"),
        ({"weight_versions": [(0, 0, 2), (1, 3, 6)]}, "do not cover the rows in order"),
        ({"weight_versions": [(0, 0, 5)]}, "end at row 5, need 6"),
    ],
)
def test_trace_refuses_contradictions_by_name(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trace(**fields)


def test_equality_compares_array_contents() -> None:
    assert make_trace(1, 2) == make_trace(1, 2)
    other = make_trace(1, 2)
    other.routed_experts = other.routed_experts.copy()
    other.routed_experts[0, 0, 0] ^= 1
    assert other != make_trace(1, 2)
    assert make_trace(routed_experts=None) != make_trace()
    assert make_trace().__eq__("a") is NotImplemented


def test_the_phase_of_each_row_is_where_its_token_came_from() -> None:
    long = long_trace()  # tokens 11 12 | 13 14: the inputs of its three rows are 11, 12 and 13
    assert long.phase.tolist() == ["prefill", "prefill", "decode"]
    assert long.routed_experts[long.phase == "decode"].tolist() == [LONG_IDS[2]]
    assert holed_trace().phase.tolist() == ["prefill", "decode"]  # begins with the row of 12
    assert toy_trace("scored", [11, 12, 13], [], LONG_IDS).phase.tolist() == ["prefill"] * 3
    assert dataclasses.replace(long, routed_experts=None).phase.tolist() == []


def test_sql_finds_the_phase_from_the_columns(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, TOY) as writer:
        writer.write([long_trace(), holed_trace(), short_trace()], step=0)
        writer.commit(0)
    rows = "unnest(range(len(routed_experts))) as j, sample_id, route_start, len(prompt_ids) as prompt"
    query = (
        f"select sample_id, sum((route_start + j < prompt)::int) from (select {rows} from '{tmp_path}/*-*/*.parquet')"
    )
    found = dict(duckdb.sql(f"{query} group by sample_id").fetchall())
    assert (
        found
        == {t.sample_id: (t.phase == "prefill").sum() for t in TraceDataset(tmp_path)}
        == {
            "long": 2,
            "holed": 1,
            "short": 1,
        }
    )


def test_a_spec_made_of_a_list_equals_that_of_a_tuple() -> None:
    sites = [Site("gate", 0, 4, 2)]
    assert RoutingSpec(sites) == RoutingSpec(tuple(sites))  # type: ignore[arg-type]
