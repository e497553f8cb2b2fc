"""merge_turns: token-id prefixes, and the row on each boundary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from storage import MergedTrace, Trace, WeightSpan, merge_turns
from tests.storage.builders import make_trace, routes


def turn(name: str, prompt: list[int], completion: list[int], *ids: int, **fields: Any) -> Trace:
    logprobs = [-float(token) for token in completion]
    defaults = {"raw_logprobs": [-token - 0.5 for token in completion], "finish_reason": "stop"}
    return Trace(name, 0, prompt, completion, logprobs, routes(*ids), **(defaults | fields))


FIRST = turn("c/0", [1, 2], [3, 4], 10, 11, 12)
FULL = turn("c/1", [1, 2, 3, 4, 5], [6], 1, 2, 3, 4, 5, weight_version=1, reward=1.0)
DELTA = turn("c/1", [1, 2, 3, 4, 5], [6], 4, 5, route_start=3, weight_version=1, reward=1.0)


@pytest.mark.parametrize("second", [FULL, DELTA, turn("c/1", [1, 2, 3, 4, 5], [6], 3, 4, 5, route_start=2)])
def test_each_turn_gives_the_rows_from_where_the_turn_before_ended(second: Trace) -> None:
    merged = merge_turns([FIRST, second])
    assert merged.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert merged.routed_experts.ravel().tolist() == [10, 11, 12, 4, 5], "the row of token 4 is the next turn's"
    assert (merged.route_start, merged.route_valid, merged.num_rows) == (0, None, 5)
    assert merged.sampled.tolist() == [False, False, True, True, False, True]
    assert merged.logprobs.tolist() == [0, 0, -3, -4, 0, -6]
    assert merged.raw_logprobs.tolist() == [0, 0, -3.5, -4.5, 0, -6.5]
    assert (merged.prompt_len, merged.turn_ids, merged.sample_id) == (2, ["c/0", "c/1"], "c/1")


def test_the_reward_is_the_last_turns_and_each_row_keeps_its_weight_version() -> None:
    third = turn("c/2", [1, 2, 3, 4, 5, 6], [7], 6, route_start=5, weight_version=1, reward=0.5)
    merged = merge_turns([FIRST, DELTA, third])
    assert merged.reward == 0.5
    assert merged.weight_versions == [WeightSpan(0, 0, 3), WeightSpan(1, 3, 6)]
    assert merged.routed_experts.ravel().tolist() == [10, 11, 12, 4, 5, 6]


def test_invalid_rows_stay_invalid_and_raw_logprobs_are_all_or_none() -> None:
    second = turn("c/1", [1, 2, 3, 4, 5], [6], 0, 5, route_start=3, route_valid=[False, True], raw_logprobs=None)
    merged = merge_turns([FIRST, second])
    assert merged.route_valid.tolist() == [True, True, True, False, True]
    assert merged.raw_logprobs is None


def test_a_turn_without_completion_gives_a_row_for_its_last_token() -> None:
    prefill = turn("c/0", [1, 2], [], 10, 11, finish_reason="length")
    assert merge_turns([prefill, turn("c/1", [1, 2, 3], [4], 7, route_start=2)]).routed_experts.ravel().tolist() == [
        10,
        11,
        7,
    ]


def test_one_turn_is_the_trace_itself() -> None:
    trace = make_trace()
    merged = merge_turns([trace])
    assert np.array_equal(merged.routed_experts, trace.routed_experts)
    assert merged.token_ids.tolist() == trace.token_ids
    assert MergedTrace.of(trace).routed_experts is trace.routed_experts


@pytest.mark.parametrize(
    ("traces", "message"),
    [
        ([], "empty list of turns"),
        ([FIRST, turn("c/1", [1, 2, 3, 4, 5], [6], 5, route_start=4)], "'c/1' has a gap: .* position 4, .* at row 3"),
        ([DELTA], "'c/1' has a gap: its rows start at position 3, the conversation begins at row 0"),
        ([FIRST, turn("c/1", [1, 9, 3, 4], [6], 1, 2, 3, 4)], "fork: position 1 is token 9, in turn 'c/0' it is 2"),
        ([FIRST, turn("c/1", [1, 2, 3], [6], 1, 2, 3)], "fork: its prompt ends at position 3, within the 4 tokens"),
        ([FULL, FIRST], "'c/0' is a fork: its prompt ends at position 2"),
        (
            [FIRST, turn("c/1", [1, 2, 3, 8, 5], [6], 1, 2, 3, 4, 5)],
            "'c/1' tokenises the completion before it anew: position 3 is token 8, in turn 'c/0' it is 4",
        ),
        (
            [FIRST, turn("c/1", [1, 2, 3, 4, 5], [], finish_reason="abort")],
            "'c/1' has a gap: it ended before position 3 was computed; leave it out",
        ),
        ([FIRST, Trace("c/1", 0, [1, 2, 3, 4], [], [], None, "abort")], "'c/1' has no routes"),
        (
            [FIRST, make_trace(prompt_ids=[1, 2, 3, 4, 5], completion=1, routed_experts=np.ones((5, 3, 2), int))],
            r"'run/0/0/0' has rows of \(3, 2\), and 'c/0' of \(1, 1\)",
        ),
    ],
)
def test_what_is_no_continuation_is_refused_by_turn_and_position(traces: list[Trace], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge_turns(traces)
