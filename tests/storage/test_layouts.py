"""Split and packed layouts, truncation, masks, advantages and the routes of padding, written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import ReplayBatch, RoutingSpec, Site, Trace, WeightSpan, merge_turns
from storage.layouts import strided_routes
from tests.storage.builders import ONE, SPEC, make_pair, make_trace, make_traces


def ids(batch: ReplayBatch) -> list[list[int]]:
    return batch.routed_experts[:, :, 0, 0].tolist()


def bits(mask: np.ndarray) -> list[list[int]]:
    return mask.astype(int).tolist()


def test_split_prompts_end_and_completions_start_at_one_column() -> None:
    batch = ReplayBatch.collate(make_pair(), spec=ONE, padding="split", pad_token_id=99)
    assert batch.prompt_width == 2
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15], [99, 21, 22, 23, 99]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 0]]
    assert bits(batch.completion_mask) == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -2, -3], [0, 0, -4, -5, 0]]
    assert ids(batch) == [[0, 5, 0, 7, 0], [0, 8, 9, 0, 0]]
    assert bits(batch.route_mask) == [[0, 1, 0, 1, 0], [0, 1, 1, 0, 0]]
    assert bits(batch.input_mask) == [[1, 1, 1, 1, 0], [0, 1, 1, 0, 0]]


def test_packed_is_one_row_whose_positions_restart() -> None:
    batch = ReplayBatch.collate(make_pair(), spec=ONE, padding="packed")
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15, 21, 22, 23]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert bits(batch.completion_mask) == [[0, 0, 1, 1, 1, 0, 1, 1]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -2, -3, 0, -4, -5]]
    assert ids(batch) == [[0, 5, 0, 7, 0, 8, 9, 0]]
    assert bits(batch.route_mask) == [[0, 1, 0, 1, 0, 1, 1, 0]]
    assert batch.rewards.shape == (2,)
    assert batch.num_rows == 8


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        ("right", [[11, 12, 13, 14, 15, 0, 0, 0], [21, 22, 23, 0, 0, 0, 0, 0]]),
        ("left", [[0, 0, 0, 11, 12, 13, 14, 15], [0, 0, 0, 0, 0, 21, 22, 23]]),
        ("split", [[11, 12, 13, 14, 15, 0, 0, 0], [0, 21, 22, 23, 0, 0, 0, 0]]),
        ("packed", [[11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 23, 0]]),
    ],
)
def test_the_width_can_be_a_multiple(padding: str, expected: list[list[int]]) -> None:
    batch = ReplayBatch.collate(make_pair(), spec=ONE, padding=padding, pad_to_multiple_of=4)
    assert batch.input_ids.tolist() == expected
    assert batch.attention_mask.tolist() == [[int(token > 0) for token in row] for row in expected]


def test_in_a_packed_batch_padding_belongs_to_the_sequence_before_it() -> None:
    batch = ReplayBatch.collate(make_pair(), spec=ONE, padding="packed", pad_to_multiple_of=4)
    assert batch.cu_seqlens.tolist() == [0, 8, 12]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]]


def test_truncation_cuts_the_end_of_completions_and_says_so() -> None:
    batch = ReplayBatch.collate(make_pair(), spec=ONE, max_length=4)
    assert batch.truncated.tolist() == [True, False]
    assert batch.input_ids.tolist() == [[11, 12, 13, 14], [21, 22, 23, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -2], [0, -4, -5, 0]]
    assert bits(batch.route_mask) == [[0, 1, 0, 1], [1, 1, 0, 0]], "the last token that stays was an input"
    assert bits(batch.input_mask) == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.weight_versions[0] == [WeightSpan(0, 0, 3), WeightSpan(1, 3, 4)]
    assert not ReplayBatch.collate(make_pair(), spec=ONE).truncated.any()


def test_truncation_to_the_prompt_drops_rows_and_spans_behind_it() -> None:
    batch = ReplayBatch.collate(make_pair()[:1], spec=ONE, max_length=2)
    assert batch.input_ids.tolist() == [[11, 12]]
    assert not batch.completion_mask.any()
    assert ids(batch) == [[0, 5]]
    assert batch.weight_versions == [[WeightSpan(0, 0, 2)]]


def test_advantages_are_numbers_per_trace_or_per_token() -> None:
    batch = ReplayBatch.collate(make_pair(), spec=ONE, advantages=[[1, 2, 3], -0.5])
    assert batch.advantages.tolist() == [[0, 0, 1, 2, 3], [0, -0.5, -0.5, 0, 0]]
    assert batch.advantages.dtype == np.float32
    packed = ReplayBatch.collate(make_pair(), spec=ONE, padding="packed", advantages=np.array([2.0, 4.0]), max_length=4)
    assert packed.advantages.tolist() == [[0, 0, 2, 2, 0, 4, 4]]
    assert ReplayBatch.collate(make_pair(), spec=ONE).advantages is None


def test_the_loss_mask_is_the_completion_mask_unless_given() -> None:
    batch = ReplayBatch.collate(make_pair(), spec=ONE)
    assert batch.loss_mask.dtype == np.float32
    assert np.array_equal(batch.loss_mask, batch.completion_mask)
    given = ReplayBatch.collate(make_pair(), spec=ONE, loss_masks=[[True, False, True], [0.25, 0]])
    assert given.loss_mask.tolist() == [[0, 0, 1, 0, 1], [0, 0.25, 0, 0, 0]]
    assert np.array_equal(given.completion_mask, batch.completion_mask)


def test_strided_padding_is_forced_to_distinct_ids_and_nothing_else_changes() -> None:
    native = ReplayBatch.collate(make_traces(0), spec=SPEC)
    strided = ReplayBatch.collate(make_traces(0), spec=SPEC, pad_routes="strided")
    padding = strided.attention_mask == 0
    assert strided.routed_experts[padding][:3, 0].tolist() == [[0, 8], [1, 9], [2, 10]]
    assert np.array_equal(strided.route_mask, native.route_mask | padding)
    assert np.array_equal(strided.routed_experts[~padding], native.routed_experts[~padding])
    assert not native.route_mask[padding].any()


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (16, 1), (10, 4), (7, 3), (300, 8), (5, 5)])
def test_strided_ids_are_distinct_and_load_the_experts_equally(experts: int, top_k: int) -> None:
    spec = RoutingSpec.uniform(num_sites=2, num_experts=experts, top_k=top_k)
    for count in (1, 2, 3, experts - 1, experts + 4):
        routes = strided_routes(spec, count)
        assert all(len(set(row)) == top_k for row in routes[:, 1].tolist())
        load = np.bincount(routes[:, 0].ravel(), minlength=experts)
        assert load.max() - load.min() <= 1


def test_strided_ids_leave_the_slots_that_a_site_does_not_use_at_zero() -> None:
    spec = RoutingSpec((Site("a", 0, 8, 1), Site("b", 1, 4, 2)))
    assert strided_routes(spec, 2).tolist() == [[[0, 0], [0, 2]], [[1, 0], [1, 3]]]
    spec.check_routes(strided_routes(spec, 9), name="strided")


def test_a_conversation_scores_only_what_was_sampled() -> None:
    first = make_trace(0, 0, prompt=2, completion=2, prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-1, -2])
    routes = np.ones((6, 3, 2), np.uint8)
    second = Trace("b", 0, [1, 2, 3, 4, 5], [6, 7], [-3, -4], routes, "stop", reward=0.5)
    batch = ReplayBatch.collate([merge_turns([first, second]), make_trace()], spec=SPEC, advantages=[2, 0])
    assert batch.input_ids[0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.completion_mask[0].tolist() == [False, False, True, True, False, True, True]
    assert batch.loss_mask[0].tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert batch.advantages[0].tolist() == [0, 0, 2, 2, 0, 2, 2]
    assert batch.logprobs[0].tolist() == [0, 0, -1, -2, 0, -3, -4]
    assert np.array_equal(batch.routed_experts[0, :3], first.routed_experts)
    assert batch.sample_ids == ["b", "run/0/0/0"]
    with pytest.raises(ValueError, match=r"loss_masks of trace 'b' is 1\.0 at position 4, which was not sampled"):
        ReplayBatch.collate([merge_turns([first, second])], spec=SPEC, loss_masks=[np.ones(5)])


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(["right", "left", "split", "packed"]), st.integers(1, 4), st.integers(5, 10))
def test_every_sequence_can_be_read_back_from_every_layout(sizes, padding: str, multiple: int, limit: int) -> None:
    traces = [make_trace(0, i, prompt=prompt, completion=completion) for i, (prompt, completion) in enumerate(sizes)]
    options = {"padding": padding, "pad_to_multiple_of": multiple, "max_length": limit}
    batch = ReplayBatch.collate(traces, spec=SPEC, advantages=range(len(traces)), **options)
    for index, part in enumerate(batch.micro_batches(len(traces))):
        trace, real = traces[index], part.attention_mask == 1
        kept = min(len(trace.token_ids), limit)
        assert part.input_ids[real].tolist() == trace.token_ids[:kept]
        assert part.position_ids[real].tolist() == list(range(kept))
        assert part.routed_experts[part.route_mask].tolist() == trace.routed_experts[:kept].tolist()
        assert part.logprobs[part.completion_mask].tolist() == trace.logprobs[: kept - len(trace.prompt_ids)].tolist()
        assert set(part.advantages[part.completion_mask].tolist()) <= {index}
        assert (part.sample_ids, part.truncated.tolist()) == ([trace.sample_id], [kept < len(trace.token_ids)])
    assert batch.attention_mask.sum() == sum(min(len(trace.token_ids), limit) for trace in traces)
    assert batch.input_ids.shape[1] % multiple == 0
