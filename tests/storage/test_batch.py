"""ReplayBatch.collate against values written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage import ReplayBatch, RoutingSpec, Trace, WeightSpan
from tests.storage.builders import SPEC, make_trace, make_traces

ONE = RoutingSpec.uniform(num_sites=1, num_experts=16, top_k=1)


def routes(*ids: int) -> np.ndarray:
    return np.array(ids, np.uint8).reshape(-1, 1, 1)


@pytest.fixture
def pair() -> list[Trace]:
    """Five tokens with routes from position 1 of which one is invalid, and three tokens with a reward."""
    long = Trace(
        sample_id="long",
        step=0,
        prompt_ids=[11, 12],
        completion_ids=[13, 14, 15],
        logprobs=[-1.0, -2.0, -3.0],
        raw_logprobs=[-1.5, -2.5, -3.5],
        routed_experts=routes(5, 0, 7),
        route_start=1,
        route_valid=[True, False, True],
        finish_reason="length",
        weight_versions=[(0, 0, 3), (1, 3, 4)],
    )
    short = Trace(
        sample_id="short",
        step=0,
        prompt_ids=[21],
        completion_ids=[22, 23],
        logprobs=[-4.0, -5.0],
        raw_logprobs=[-4.5, -5.5],
        routed_experts=routes(8, 9),
        finish_reason="stop",
        reward=1.0,
    )
    return [long, short]


def test_right(pair: list[Trace]) -> None:
    batch = ReplayBatch.collate(pair, spec=ONE, pad_token_id=99)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15], [21, 22, 23, 99, 99]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]]
    assert batch.completion_mask.astype(int).tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -2, -3], [0, -4, -5, 0, 0]]
    assert batch.raw_logprobs.tolist() == [[0, 0, -1.5, -2.5, -3.5], [0, -4.5, -5.5, 0, 0]]
    assert batch.routed_experts[:, :, 0, 0].tolist() == [[0, 5, 0, 7, 0], [8, 9, 0, 0, 0]]
    assert batch.route_mask.astype(int).tolist() == [[0, 1, 0, 1, 0], [1, 1, 0, 0, 0]]
    assert np.isnan(batch.rewards[0])
    assert batch.rewards[1] == 1.0
    assert batch.sample_ids == ["long", "short"]
    assert batch.weight_versions[0] == [WeightSpan(0, 0, 3), WeightSpan(1, 3, 4)]
    assert batch.num_rows == 10
    assert batch.routed_experts.dtype == np.uint8
    assert batch.input_ids.dtype == batch.attention_mask.dtype == batch.position_ids.dtype == np.int64
    assert batch.logprobs.dtype == batch.raw_logprobs.dtype == batch.rewards.dtype == np.float32


def test_left(pair: list[Trace]) -> None:
    batch = ReplayBatch.collate(pair, spec=ONE, padding="left")
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 15], [0, 0, 21, 22, 23]]
    assert batch.attention_mask.tolist()[1] == [0, 0, 1, 1, 1]
    assert batch.position_ids.tolist()[1] == [0, 0, 0, 1, 2]
    assert batch.completion_mask.astype(int).tolist()[1] == [0, 0, 0, 1, 1]
    assert batch.logprobs.tolist()[1] == [0, 0, 0, -4, -5]
    assert batch.routed_experts[:, :, 0, 0].tolist() == [[0, 5, 0, 7, 0], [0, 0, 8, 9, 0]]
    assert batch.route_mask.astype(int).tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 1, 0]]


def test_a_prompt_only_trace_has_a_row_for_its_last_token() -> None:
    trace = make_trace(prompt=3, completion=0, routed_experts=np.ones((3, 3, 2), int), finish_reason="length")
    batch = ReplayBatch.collate([trace, make_trace(0, 1)], spec=SPEC)
    assert batch.route_mask.astype(int).tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]


def test_dtype_follows_the_spec_and_raw_logprobs_are_all_or_none() -> None:
    spec = RoutingSpec.uniform(num_sites=3, num_experts=300, top_k=2)
    batch = ReplayBatch.collate([make_trace(), make_trace(0, 1, raw_logprobs=None)], spec=spec)
    assert batch.routed_experts.dtype == np.uint16
    assert batch.raw_logprobs is None


@pytest.mark.parametrize(
    ("traces", "options", "message"),
    [
        ([], {}, "empty list"),
        ([make_trace()], {"padding": "packed"}, "'packed' is not supported; supported: right, left"),
        ([make_trace()], {"padding": "split"}, "'split' is not supported"),
        ([make_trace(0, 1), make_trace(routed_experts=None)], {}, "'run/0/0/0' has no routes: .* capture off"),
        ([make_trace()], {"spec": ONE}, r"'run/0/0/0'.*shape \(6, 3, 2\), need \[rows, 1, 1\]"),
        ([make_trace(prompt=0)], {}, "'run/0/0/0' has no prompt tokens"),
    ],
)
def test_refusals_name_the_sample(traces: list[Trace], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayBatch.collate(traces, **({"spec": SPEC} | options))


def test_model_inputs_are_the_arrays_as_tensors(pair: list[Trace]) -> None:
    batch = ReplayBatch.collate(pair, spec=ONE)
    inputs = batch.model_inputs()
    assert list(inputs) == ["input_ids", "attention_mask", "position_ids"]
    assert all(np.array_equal(tensor.numpy(), getattr(batch, name)) for name, tensor in inputs.items())
    assert batch.tensors()["route_mask"].dtype == torch.bool
    assert batch.tensors()["routed_experts"].shape == (2, 5, 1, 1)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_token_logprobs_score_each_sampled_token_by_the_column_before_it(padding: str) -> None:
    batch = ReplayBatch.collate(make_traces(0), spec=SPEC, padding=padding)
    logits = torch.randn(*batch.input_ids.shape, 100, generator=torch.Generator().manual_seed(0)).requires_grad_()
    result = batch.token_logprobs(logits)
    for row, column in np.ndindex(batch.input_ids.shape):
        expected = 0.0
        if batch.completion_mask[row, column]:
            scores = logits[row, column - 1].detach().numpy().astype(np.float64)
            expected = scores[batch.input_ids[row, column]] - np.log(np.exp(scores).sum())
        assert result[row, column].item() == pytest.approx(expected, abs=1e-5)
    result.sum().backward()
    used = logits.grad.abs().sum(-1) > 0
    assert np.array_equal(used[:, :-1].numpy(), batch.completion_mask[:, 1:])


def test_token_logprobs_are_float32_for_bfloat16_logits_and_refuse_other_shapes() -> None:
    batch = ReplayBatch.collate(make_traces(0), spec=SPEC)
    assert batch.token_logprobs(torch.zeros(5, 9, 100, dtype=torch.bfloat16)).dtype == torch.float32
    with pytest.raises(ValueError, match=r"\(5, 8, 100\) for input_ids of shape \(5, 9\)"):
        batch.token_logprobs(torch.zeros(5, 8, 100))
