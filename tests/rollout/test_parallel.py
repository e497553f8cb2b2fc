"""Slices of a data-parallel batch: Python ints, disjoint, complete, and those of a cumulative sum."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.parallel import ExpertRange, RankGroup, StepShape, get_dp_local_slice_cpu

COUNTS = st.lists(st.integers(0, 50), min_size=1, max_size=8)


def slices(counts, graph, graph_batch):
    return [get_dp_local_slice_cpu(counts, rank, graph, graph_batch) for rank in range(len(counts))]


@given(COUNTS)
def test_ragged_slices_are_those_of_a_cumulative_sum(counts):
    ends = np.cumsum(counts)
    assert slices(counts, False, None) == [(int(end) - n, n) for end, n in zip(ends, counts, strict=True)]


@given(COUNTS, st.integers(0, 10))
def test_under_a_graph_every_rank_starts_at_its_own_block(counts, slack):
    batch = max(counts) + slack
    assert slices(counts, True, batch) == [(rank * batch, n) for rank, n in enumerate(counts)]


@given(COUNTS, st.booleans(), st.integers(0, 10))
def test_slices_are_disjoint_in_bounds_and_cover_every_real_row(counts, graph, slack):
    batch = max(counts) + slack if graph else None
    total = len(counts) * batch if graph else sum(counts)
    rows = [row for start, length in slices(counts, graph, batch) for row in range(start, start + length)]
    assert len(rows) == len(set(rows)) == sum(counts)
    assert all(0 <= row < total for row in rows)


@given(COUNTS, st.booleans(), st.integers(1, 4))
def test_the_slice_of_a_step_never_holds_a_padded_row(counts, graph, multiple):
    """Rows as a padded batch lays them out by hand: real ones carry their rank, padding carries -1."""
    padded = tuple(-(-n // multiple) * multiple for n in counts)
    shape = StepShape(tuple(counts), max(*counts, 1) if graph else None, padded)
    laid_out = []
    for rank, (count, rows) in enumerate(zip(counts, shape.rows, strict=True)):
        laid_out += [rank] * count + [-1] * (rows - count)
    assert shape.total_rows == len(laid_out)
    for rank, count in enumerate(counts):
        start, length = shape.local_slice(rank)
        assert laid_out[start : start + length] == [rank] * count


def test_bounds_are_python_ints():
    bounds = [*get_dp_local_slice_cpu(np.array([3, 4]), 1, False, None), *get_dp_local_slice_cpu([3, 4], 1, True, 8)]
    assert {type(bound) for bound in bounds} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 0, False, None), "global_num_tokens_cpu is None"),
        (([3, 4], 0, True, None), "graph_batch is None, but the step runs under a graph"),
        (([3, 9], 0, True, 8), r"graph_batch 8 does not hold 9 tokens of global_num_tokens_cpu \[3, 9\]"),
        (([3, 4], 2, False, None), "dp_rank 2 is not in a group of 2 ranks"),
        (([3, -4], 0, False, None), "negative count"),
    ],
)
def test_a_slice_that_cannot_be_is_an_error_that_says_why(arguments, message):
    with pytest.raises(ValueError, match=message):
        get_dp_local_slice_cpu(*arguments)


@pytest.mark.parametrize(("rows", "forwards"), [(4, [4]), (3, [4]), (3, [1, 2])])
def test_a_step_with_other_rows_than_agreed_is_an_error(rows, forwards):
    group = RankGroup(0, 2, "allgather")
    group.begin(9, StepShape((3, 5)))
    assert group.captured(3, [3]) == (0, [8])
    with pytest.raises(ValueError, match=rf"{re.escape(str(forwards))}.*\(3, 5\)"):
        group.captured(rows, forwards)


def test_rows_that_are_not_as_many_as_agreed_are_not_gathered():
    group = RankGroup(0, 2, "allgather")
    group.begin(9, StepShape((3, 5)))
    with pytest.raises(ValueError, match=r"rank 0 has 4 rows in step 9, but agreed on \(3, 5\)"):
        group.all_gather_rows(torch.zeros(4, 2), "the inputs of layer 0")


def test_experts_are_divided_evenly_or_the_sizes_that_would_do_are_named():
    assert [ExpertRange.of(rank, 4, 8)[:2] for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    with pytest.raises(ValueError, match=r"dp_size 3 does not divide 8 experts; use one of \[2, 4, 8\]"):
        ExpertRange.of(0, 3, 8)
