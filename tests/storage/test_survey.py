"""The survey of routes written out by hand, and of random ones against DuckDB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pytest

from storage import RoutingSpec, Site, Trace
from storage.stats import load_entropy
from storage.survey import Survey, survey_dataset
from tests.storage.builders import ONE, SPEC, make_pair, make_traces
from tests.storage.test_drift import written
from tests.storage.toy import TOY, holed_trace, long_trace, short_trace


def test_figures_of_one_step_by_hand() -> None:
    survey = Survey(TOY)
    survey.add_step(4, [long_trace(), short_trace()])
    assert (survey.steps, survey.samples, survey.rows, survey.neighbours) == ([4], 2, 4, 2)
    assert [load.tolist() for load in survey.load()] == [[2, 3, 2, 1], [2, 1, 2, 3]]
    assert survey.reuse().tolist() == [2 / 4, 2 / 4]
    assert survey.chance().tolist() == [(4 + 9 + 4 + 1) / 16 / 2, (4 + 1 + 4 + 9) / 16 / 2]
    assert survey.entropy().tolist() == [[load_entropy(np.array(counts)) for counts in ([2, 3, 2, 1], [2, 1, 2, 3])]]


def test_blocks_of_rows_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = make_traces(0, count=20)
    whole, parts = Survey(SPEC), Survey(SPEC)
    whole.add_step(0, traces)
    monkeypatch.setattr("storage.choices.ROWS_AT_ONCE", 3)
    parts.add_step(0, traces)
    assert parts.reuse().tolist() == whole.reuse().tolist()
    assert [load.tolist() for load in parts.load()] == [load.tolist() for load in whole.load()]


def test_missing_rows_are_no_neighbours_and_count_nothing() -> None:
    survey = Survey(TOY)
    survey.add_step(0, [holed_trace(), replace(long_trace(), routed_experts=None)])
    survey.add_step(1, [replace(long_trace(), routed_experts=None)])
    assert (survey.steps, survey.samples, survey.rows, survey.neighbours) == ([0], 3, 1, 0)
    with pytest.raises(ValueError, match="no two neighbouring tokens"):
        survey.reuse()


def test_sites_may_differ_in_experts_and_top_k() -> None:
    """Site 1 has three experts and K = 1; the 0 in its second slot is no expert."""
    spec = RoutingSpec((TOY.sites[0], Site("layers.2.gate", 2, 3, 1)))
    ids = [[[0, 1], [0, 0]], [[1, 2], [1, 0]], [[2, 1], [1, 0]]]
    survey = Survey(spec)
    survey.add_step(0, [replace(long_trace(), routed_experts=np.array(ids, np.uint8))])
    assert [load.tolist() for load in survey.load()] == [[1, 3, 2, 0], [1, 2, 0]]
    assert survey.rows == 3
    assert survey.reuse().tolist() == [3 / 4, 1 / 2]
    assert survey.chance().tolist() == [(1 + 9 + 4) / 9 / 2, (1 + 4) / 9]


def test_versions_by_hand() -> None:
    survey = Survey(ONE)
    survey.add_step(0, make_pair())  # version 0 chose 5, 8 and 9, version 1 chose 7
    assert survey.versions == [0, 1]
    assert [np.flatnonzero(survey.load_of(version)[0]).tolist() for version in (0, 1)] == [[5, 8, 9], [7]]
    assert survey.moved_between(0, 1).tolist() == [1.0]
    survey.add_step(1, [replace(make_pair()[1], sample_id="later", weight_version=1, weight_versions=[(1, 0, 2)])])
    assert survey.moved_between(0, 1).tolist() == [1 / 3]  # 5 8 9 against 7 8 9


def test_moved_by_chance_is_what_equal_routers_show_on_other_prompts() -> None:
    """40 pairs of versions with one router: 30 and 60 prompts, each with a taste of its own in its 8 rows."""
    rng, spec = np.random.default_rng(0), RoutingSpec.uniform(num_sites=1, num_experts=16, top_k=2)
    odds = np.linspace(0, 2, 16)
    tokens = {"prompt_ids": [1], "completion_ids": [1] * 8, "logprobs": np.zeros(8), "finish_reason": "stop"}
    expected, seen = [], []
    for pair in range(40):
        survey = Survey(spec)
        traces = []
        for prompt in range(90):
            scores = odds + rng.normal(size=16) + rng.gumbel(size=(8, 1, 16))
            ids = np.argsort(-scores, axis=-1)[..., :2].astype(np.uint8)
            name = f"run{pair}/0/{prompt}/0"
            traces.append(Trace(name, 0, routed_experts=ids, weight_version=int(prompt >= 30), **tokens))
        survey.add_step(0, traces)
        expected.append(survey.moved_by_chance(0, 1)[0])
        seen.append(survey.moved_between(0, 1)[0])
    assert np.mean(expected) == pytest.approx(np.mean(seen), rel=0.1)


def test_one_prompt_says_nothing_about_chance() -> None:
    survey = Survey(ONE)
    survey.add_step(0, [replace(trace, group_id="one") for trace in make_pair()])
    assert np.isnan(survey.moved_by_chance(0, 1)).all()


def test_load_of_random_steps_against_duckdb(tmp_path: Path) -> None:
    dataset = written(tmp_path / "ds", SPEC, [*make_traces(0), *make_traces(3)])
    query = (
        "select step, cast(('0x' || substr(hex(row), 5, 2)) as int) as expert, count(*) from "  # site 1, first of two
        f"(select step, unnest(routed_experts) as row from '{tmp_path}/ds/*-*/*.parquet') group by step, expert"
    )
    expected = {0: np.zeros(16, int), 3: np.zeros(16, int)}
    for offset in (5, 7):
        for step, expert, count in duckdb.sql(query.replace("row), 5", f"row), {offset}")).fetchall():
            expected[step][expert] += count
    survey = survey_dataset(dataset)
    assert survey.load()[1].tolist() == (expected[0] + expected[3]).tolist()
    assert survey.entropy()[:, 1].tolist() == pytest.approx([load_entropy(expected[0]), load_entropy(expected[3])])
    assert survey_dataset(dataset, 3).load()[1].tolist() == expected[3].tolist()


def test_a_dataset_without_routes_is_refused(tmp_path: Path) -> None:
    dataset = written(tmp_path / "ds", TOY, [replace(long_trace(), routed_experts=None)])
    with pytest.raises(ValueError, match=r"none of the 1 samples of .* has recorded routes"):
        survey_dataset(dataset)
