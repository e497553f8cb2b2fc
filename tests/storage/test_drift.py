"""Drift of routes written out by hand, and of random ones against plain Python sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage import RoutingSpec, Site, SpecMismatchError, Trace, TraceDataset, TraceWriter
from storage.drift import Drift, compare_datasets, load_moved
from tests.storage.builders import SPEC, make_trace
from tests.storage.toy import TOY, holed_trace, long_trace, short_trace

TURNED = [[[1, 0], [2, 3]], [[1, 3], [0, 3]], [[3, 1], [1, 3]]]
"""Of LONG_IDS: row 0 in another order; at site 0 row 1 takes 3 for 2; at site 1 row 2 takes 1 3 for 0 2."""


def turned() -> Trace:
    return replace(long_trace(), routed_experts=np.array(TURNED, np.uint8))


def distinct(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Random rows of SPEC without an id twice."""
    return np.argsort(rng.random((rows, 3, 16)), axis=-1)[..., :2].astype(np.uint8)


def drift(left: Trace, right: Trace) -> Drift:
    found = Drift(TOY)
    found.add(left, right)
    return found


def written(root: Path, spec: RoutingSpec, traces: list[Trace]) -> TraceDataset:
    with TraceWriter(root, spec) as writer:
        for step in sorted({trace.step for trace in traces}):
            writer.write([trace for trace in traces if trace.step == step], step=step)
            writer.commit(step)
    return TraceDataset(root)


def test_overlap_and_movers_by_hand() -> None:
    found = drift(long_trace(), turned())
    first, second = found.sites()
    assert (found.samples, found.rows, found.other_tokens) == (1, 3, 0)
    assert (first.overlap, first.same_set, first.load_moved) == pytest.approx((5 / 6, 2 / 3, 1 / 6))
    assert (second.overlap, second.same_set, second.load_moved) == pytest.approx((4 / 6, 2 / 3, 1 / 3))
    assert (first.gained.tolist(), first.lost.tolist()) == ([0, 0, 0, 1], [0, 0, 1, 0])
    assert (second.gained.tolist(), second.lost.tolist()) == ([0, 1, 0, 1], [1, 0, 1, 0])


def test_sites_may_differ_in_experts_and_top_k() -> None:
    """Site 1 has three experts and K = 1: its second slot is 0 and means nothing, least of all expert 0."""
    spec = RoutingSpec((TOY.sites[0], Site("layers.2.gate", 2, 3, 1)))
    left, right = ([[[0, 1], [0, 0]], [[1, 2], [1, 0]]], [[[1, 3], [2, 0]], [[2, 1], [1, 0]]])
    tokens = {"prompt_ids": [1], "completion_ids": [2, 3], "logprobs": [-1, -1], "finish_reason": "stop"}
    found = Drift(spec)
    found.add(*(Trace("s", 0, routed_experts=np.array(ids, np.uint8), **tokens) for ids in (left, right)))
    first, second = found.sites()
    assert (first.overlap, first.same_set, first.gained.tolist()) == (3 / 4, 1 / 2, [0, 0, 0, 1])
    assert (second.overlap, second.same_set, second.load_moved) == (1 / 2, 1 / 2, 1 / 2)
    assert (second.gained.tolist(), second.lost.tolist()) == ([0, 0, 1], [1, 0, 0])


def test_rows_count_up_to_the_first_other_token() -> None:
    third = drift(long_trace(), replace(turned(), completion_ids=[19, 14]))
    assert (third.rows, third.other_tokens) == (2, 1)
    assert [site.overlap for site in third.sites()] == [3 / 4, 1]
    last = drift(long_trace(), replace(turned(), completion_ids=[13, 19]))  # the last token has no row
    assert (last.rows, last.other_tokens) == (3, 1)


def test_rows_count_where_both_recorded_them() -> None:
    found = drift(holed_trace(), turned())
    assert (found.rows, [site.overlap for site in found.sites()]) == (1, [1 / 2, 1])


def test_without_a_row_there_is_no_figure() -> None:
    found = drift(long_trace(), replace(long_trace(), routed_experts=None))
    with pytest.raises(ValueError, match="no row to compare in 1 samples found on both sides: 1 without routes"):
        found.sites()


def test_load_moved() -> None:
    assert load_moved(np.array([2, 2, 0]), np.array([1, 2, 1])) == 0.25
    assert load_moved(np.array([1, 0]), np.array([0, 7])) == 1
    with pytest.raises(ValueError, match="0 and 1 assignments"):
        load_moved(np.array([0, 0]), np.array([0, 1]))


def test_datasets_are_joined_by_sample_id_in_any_order(tmp_path: Path) -> None:
    left = written(tmp_path / "left", TOY, [long_trace(), short_trace(), holed_trace()])
    lonely = replace(short_trace(), sample_id="lonely")
    right = written(tmp_path / "right", TOY, [lonely, short_trace(), turned()])
    found = compare_datasets(left, right)
    assert (found.samples, found.rows, found.only_left, found.only_right) == (2, 4, 1, 1)
    assert found.sites()[0].overlap == pytest.approx((5 + 2) / 8)


def test_random_datasets_against_python_sets(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    drawn = [make_trace(step, sample, completion=2 + sample) for step in range(2) for sample in range(20)]
    ours, theirs = ([replace(t, routed_experts=distinct(rng, t.route_len)) for t in drawn] for _ in range(2))
    found = compare_datasets(
        written(tmp_path / "left", SPEC, ours), written(tmp_path / "right", SPEC, theirs[::-1])
    ).sites()
    for site in range(3):
        pairs = [
            (set(a.tolist()), set(b.tolist()))
            for left, right in zip(ours, theirs, strict=True)
            for a, b in zip(left.routed_experts[:, site], right.routed_experts[:, site], strict=True)
        ]
        assert found[site].overlap == pytest.approx(sum(len(a & b) for a, b in pairs) / (2 * len(pairs)))
        assert found[site].same_set == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))
        assert found[site].gained.tolist() == [sum(e in b - a for a, b in pairs) for e in range(16)]
        assert found[site].lost.tolist() == [sum(e in a - b for a, b in pairs) for e in range(16)]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    toy = written(tmp_path / "toy", TOY, [long_trace()])
    with pytest.raises(SpecMismatchError, match=r"differ in their routers: Site\(name='layers.0.gate'"):
        compare_datasets(toy, written(tmp_path / "spec", SPEC, [make_trace()]))
    with pytest.raises(ValueError, match=r"no sample id of .* \(1 samples, 'long' first\) is in"):
        compare_datasets(toy, written(tmp_path / "other", TOY, [short_trace()]))


def test_samples_are_selected_in_the_order_asked(tmp_path: Path) -> None:
    dataset = written(tmp_path / "ds", SPEC, [make_trace(step, sample) for step in range(2) for sample in range(20)])
    ids = ["run/1/3/0", "run/0/19/0", "run/0/18/0", "run/1/3/0", "run/1/4/0"]
    assert [trace.sample_id for trace in dataset.select(ids)] == ids
    assert list(dataset.select(ids))[1] == make_trace(0, 19)
    with pytest.raises(KeyError, match="'absent' is not among the 40 samples"):
        list(dataset.select(["absent"]))
