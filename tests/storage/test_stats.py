"""Figures of two traces written out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from storage.stats import agreement, expert_load, load_entropy, mismatch
from tests.storage.toy import TOY, holed_trace, long_trace, short_trace


def test_load_counts_recorded_rows_only() -> None:
    assert [load.tolist() for load in expert_load([long_trace()], TOY)] == [[1, 3, 1, 1], [2, 0, 2, 2]]
    assert [load.tolist() for load in expert_load([holed_trace()], TOY)] == [[0, 1, 1, 0], [1, 0, 0, 1]]


def test_entropy_is_a_share_of_the_balanced_one() -> None:
    assert [load_entropy(np.array(counts)) for counts in ([3, 3], [2, 2, 0, 0], [5, 0], [0, 0])] == [1, 0.5, 0, 0]


def test_agreement_is_per_site_of_sets_and_of_rows_that_both_recorded() -> None:
    other = long_trace().routed_experts.copy()
    other[0, 0] = [1, 0]  # the same set
    other[1, 1] = [3, 1]  # was 3 0
    turned = replace(long_trace(), routed_experts=other)
    assert agreement(long_trace(), turned, TOY).tolist() == [1, 2 / 3]
    assert agreement(holed_trace(), turned, TOY).tolist() == [1, 0]
    with pytest.raises(ValueError, match="'long' and 'short' have different token ids"):
        agreement(long_trace(), short_trace(), TOY)


def test_mismatch_by_hand() -> None:
    figures = mismatch([-1.0, -1.0], [-1.0 + math.log(2), -1.0])
    assert figures == pytest.approx(
        {
            "k1": -math.log(2) / 2,
            "k3": (1 - math.log(2)) / 2,
            "mean_abs": math.log(2) / 2,
            "max_abs": math.log(2),
        }
    )
    with pytest.raises(ValueError, match=r"shapes \(1,\) and \(2,\)"):
        mismatch([0.0], [0.0, 1.0])
    with pytest.raises(ValueError, match="at position 1 is not finite"):
        mismatch([-1.0, -np.inf], [-1.0, -1.0])
