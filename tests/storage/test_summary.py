"""Figures of a dataset: two traces written out by hand, and DuckDB's answers over files, packs and annotations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage import Trace, TraceDataset, TraceWriter
from storage.summary import Moments, summarise
from tests.storage.builders import SPEC, make_trace
from tests.storage.toy import TOY, holed_trace, long_trace

REASONS = ("stop", "length", "stop", "abort", "stop")


def written(root: Path, traces: list[Trace], spec: object = SPEC) -> TraceDataset:
    with TraceWriter(root, spec) as writer:
        for step in sorted({trace.step for trace in traces}):
            writer.write([trace for trace in traces if trace.step == step], step=step)
            writer.commit(step)
    return TraceDataset(root)


def test_figures_by_hand(tmp_path: Path) -> None:
    spans = [(0, 0, 1), (1, 1, 3)]
    first = replace(long_trace(), reward=1.0, seconds=0.5, weight_versions=spans)
    figures = summarise(written(tmp_path, [first, replace(holed_trace(), reward=0.0, seconds=2.0)], TOY))
    assert figures["tokens"] == {"prompt": 4, "completion": 4, "all": 8}
    assert figures["rows"] == {"expected": 6, "recorded": 4, "missing": 2, "samples_without_routes": 0}
    assert figures["weight_versions"] == [{"version": 0, "rows": 4}, {"version": 1, "rows": 2}]
    assert figures["rewards"] == {"count": 2, "mean": 0.5, "std": 0.5, "min": 0.0, "max": 1.0, "not_finite": 0}
    assert figures["by_step"] == [{"step": 0, "samples": 2, "tokens": 8, "missing_rows": 2, "reward": 0.5}]
    # site 0 of "long" is 01 12 31, of "holed" 12: expert 1 four times of eight
    site = figures["sites"][0]
    assert (site["choices"], site["busiest_expert"], site["busiest_over_mean"], site["idle_experts"]) == (8, 1, 2.0, 0)
    shares = [1 / 8, 4 / 8, 2 / 8, 1 / 8]
    assert site["load_entropy"] == pytest.approx(-sum(p * math.log(p) for p in shares) / math.log(4))
    assert [(sample["sample_id"], sample["seconds"]) for sample in figures["slowest"]] == [
        ("holed", 2.0),
        ("long", 0.5),
    ]
    assert (figures["bytes"], figures["bytes_per_token"]) == ((size := parquet_bytes(tmp_path)), size / 8)


def parquet_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*-*/*.parquet"))


def many(root: Path) -> TraceDataset:
    traces = []
    for step in (0, 1, 2):
        for sample, reason in enumerate(REASONS):
            fields = {"reward": None if sample == 4 else step + sample / 4, "seconds": 1 + step / 8 + sample}
            trace = make_trace(step, sample, completion=2 + sample, finish_reason=reason, weight_version=step, **fields)
            traces.append(replace(trace, routed_experts=None) if sample == 3 else trace)
    dataset = written(root, traces)
    dataset.annotate(1, {"run/1/4/0": {"reward": 7.0}})
    return dataset


@pytest.mark.parametrize("packed", [False, True])
def test_figures_are_those_that_duckdb_counts(tmp_path: Path, packed: bool) -> None:
    duckdb = pytest.importorskip("duckdb")
    dataset = many(tmp_path)
    if packed:
        dataset.compact()
    rows = f"read_parquet('{tmp_path}/*-*/*.parquet')"
    rewards = f"(select case when sample_id = 'run/1/4/0' then 7.0 else reward end as r from {rows})"
    counted = duckdb.sql(
        f"""select count(*), count(distinct group_id), sum(len(prompt_ids)), sum(len(completion_ids)),
        sum(len(prompt_ids) + len(completion_ids) - 1), sum(coalesce(len(routed_experts), 0)),
        count(*) filter (where routed_experts is null), (select count(r) from {rewards}),
        (select avg(r) from {rewards}), (select stddev_pop(r) from {rewards}) from {rows}"""
    ).fetchone()
    found = summarise(dataset)
    tokens, recorded, reward = found["tokens"], found["rows"], found["rewards"]
    ours = [found["samples"], found["groups"], tokens["prompt"], tokens["completion"], recorded["expected"]]
    ours += [recorded["recorded"], recorded["samples_without_routes"], reward["count"], reward["mean"], reward["std"]]
    assert ours == pytest.approx(list(counted))
    assert recorded["missing"] == recorded["expected"] - recorded["recorded"] > 0
    reasons = duckdb.sql(f"select finish_reason, count(*) from {rows} group by 1").fetchall()
    assert found["finish_reasons"] == dict(reasons)
    slowest = duckdb.sql(f"select sample_id, seconds from {rows} order by seconds desc limit 5").fetchall()
    assert [(each["sample_id"], each["seconds"]) for each in found["slowest"]] == slowest
    loads = duckdb.sql(f"select unnest(routed_experts) as row from {rows}").fetchall()
    ids = np.frombuffer(b"".join(row for (row,) in loads), np.uint8).reshape(-1, 3, 2)
    busiest = [int(np.bincount(ids[:, site].ravel(), minlength=16).max()) for site in range(3)]
    assert [site["busiest_over_mean"] * site["choices"] / 16 for site in found["sites"]] == pytest.approx(busiest)
    assert found["bytes"] == parquet_bytes(tmp_path) > 0


def test_one_step_and_empty_ones(tmp_path: Path) -> None:
    dataset = many(tmp_path)
    one = summarise(dataset, 1)
    assert (one["samples"], one["steps"], one["bytes"]) == (5, {"count": 1, "first": 1, "last": 1}, None)
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write([], step=5)
        writer.commit(5)
    dataset.refresh()
    figures = summarise(dataset)
    assert figures["steps"] == {"count": 4, "first": 0, "last": 5}
    empty = {"step": 5, "samples": 0, "tokens": 0, "missing_rows": 0, "reward": None}
    assert figures["by_step"][-1] == empty
    assert summarise(dataset, 5)["sites"][0]["load_entropy"] is None
    json.dumps(figures, allow_nan=False)


def test_moments_are_numpys_and_say_what_was_not_finite() -> None:
    values = np.random.default_rng(0).normal(1e6, 1.0, 1000)
    moments = Moments()
    for value in [*values, math.nan, math.inf]:
        moments.add(float(value))
    figures = moments.figures()
    assert figures is not None
    assert figures["not_finite"] == 2
    expected = [1000, values.mean(), values.std(), values.min(), values.max()]
    assert [figures[name] for name in ("count", "mean", "std", "min", "max")] == pytest.approx(expected, rel=1e-9)


def test_numbers_that_are_all_not_finite_are_not_the_same_as_none(tmp_path: Path) -> None:
    dataset = written(tmp_path, [make_trace(0, sample, reward=math.nan, seconds=math.inf) for sample in range(2)])
    figures = summarise(dataset)
    nothing = {"count": 0, "mean": None, "std": None, "min": None, "max": None, "not_finite": 2}
    assert figures["rewards"] == figures["seconds_per_sample"] == nothing
    assert figures["slowest"] == []
    json.dumps(figures, allow_nan=False)
    assert Moments().figures() is None
