"""ReplayBatch.collate against values written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from storage import ReplayBatch, RoutingSpec, Trace, WeightSpan
from tests.storage.builders import ONE, SPEC, make_pair, make_trace, make_traces


@pytest.fixture
def pair() -> list[Trace]:
    return make_pair()


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
        (
            [make_trace()],
            {"padding": "middle"},
            "padding 'middle' is not supported; supported: right, left, split, pac",
        ),
        ([make_trace()], {"pad_routes": "zeros"}, "pad_routes 'zeros' is not supported; supported: native, strided"),
        ([make_trace()], {"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0, need 1 or more"),
        ([make_trace(0, 1), make_trace(routed_experts=None)], {}, "'run/0/0/0' has no routes: .* capture off"),
        ([make_trace()], {"spec": ONE}, r"'run/0/0/0'.*shape \(6, 3, 2\), need \[rows, 1, 1\]"),
        ([make_trace(routed_experts=np.full((6, 3, 2), 16))], {}, r"'run/0/0/0': site 0 .*16\), first in row 0"),
        ([make_trace(prompt=0)], {}, "'run/0/0/0' has no prompt tokens"),
        ([make_trace()], {"max_length": 2}, "'run/0/0/0': its prompt ends at position 3, behind max_length 2"),
        ([make_trace()], {"advantages": [1, 2]}, "advantages has 2 entries for 1 traces"),
        ([make_trace()], {"advantages": [[1, 2]]}, r"'run/0/0/0' has shape \(2,\), need \(4,\): .* position 3 on"),
        ([make_trace()], {"advantages": [[1, 2, np.nan, 0]]}, "advantages of trace 'run/0/0/0' is nan at position 5"),
        ([make_trace()], {"loss_masks": [1]}, r"loss_masks of trace 'run/0/0/0' has shape \(\), need \(4,\)"),
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


def test_the_inputs_of_a_packed_batch_leave_mask_and_cache_out(pair: list[Trace]) -> None:
    inputs = ReplayBatch.collate(pair, spec=ONE, padding="packed").model_inputs()
    assert inputs.pop("use_cache") is False
    assert {name: tensor.shape for name, tensor in inputs.items()} == {"input_ids": (1, 8), "position_ids": (1, 8)}


@pytest.mark.parametrize("padding", ["right", "left", "split", "packed"])
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
