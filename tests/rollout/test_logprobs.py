"""Top-n and prompt logprobs, under the distribution sampled from and of the raw model, against plain transformers."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from storage import Trace, TraceDataset
from tests.rollout.oracle import Oracle, log_distribution, log_softmax

PROMPTS = [[5, 9, 11], [7], [20, 3, 44, 60, 13, 8, 8, 2, 30]]
VARIANTS = [
    SamplingParams(max_tokens=5, ignore_eos=True, seed=3, logprobs=4, prompt_logprobs=3),
    SamplingParams(max_tokens=5, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=0, temperature=0.7, top_k=3),
    SamplingParams(max_tokens=5, ignore_eos=True, seed=3, logprobs=3, temperature=0.0),
    SamplingParams(max_tokens=5, ignore_eos=True, seed=3, prompt_logprobs=2, top_p=0.8, min_p=0.01),
    SamplingParams(max_tokens=5, ignore_eos=True, seed=3),
]


@pytest.fixture(scope="module")
def oracle(checkpoint) -> Oracle:
    return Oracle(checkpoint("qwen3_moe"))


def check_top(rows: np.ndarray, params: SamplingParams, found: tuple, n: int) -> None:
    """`rows` `[R, vocab]` logits; `found`: ids, logprobs, raw logprobs."""
    for logits, ids, logprobs, raw in zip(rows, *found, strict=True):
        expected = log_softmax(logits)
        assert len(ids) == n
        np.testing.assert_allclose(raw, np.sort(expected)[::-1][:n], atol=1e-5)
        np.testing.assert_allclose(expected[ids], raw, atol=1e-5)
        np.testing.assert_allclose(logprobs, log_distribution(logits, params)[ids], atol=1e-5)


def check(oracle: Oracle, trace: Trace, params: SamplingParams) -> None:
    rows = oracle.forward(trace.token_ids).logits
    start = len(trace.prompt_ids) - 1
    if params.logprobs:
        found = trace.top_ids, trace.top_logprobs, trace.raw_top_logprobs
        check_top(rows[start:-1], params, found, params.logprobs)
    else:
        assert trace.top_ids is None
    if params.prompt_logprobs is None:
        assert trace.prompt_logprobs is trace.raw_prompt_logprobs is trace.prompt_top_ids is None
        return
    targets = trace.prompt_ids[1:]
    raw = [log_softmax(logits)[token] for logits, token in zip(rows, targets, strict=False)]
    processed = [log_distribution(logits, params)[token] for logits, token in zip(rows, targets, strict=False)]
    np.testing.assert_allclose(trace.raw_prompt_logprobs, raw, atol=1e-5)
    np.testing.assert_allclose(trace.prompt_logprobs, processed, atol=1e-5)
    if params.prompt_logprobs and targets:
        found = trace.prompt_top_ids, trace.prompt_top_logprobs, trace.raw_prompt_top_logprobs
        check_top(rows[:start], params, found, params.prompt_logprobs)


@pytest.mark.parametrize("max_batch_tokens", [2, 2048])
@pytest.mark.parametrize("disable_overlap_schedule", [False, True])
def test_all_are_those_of_the_plain_model(
    checkpoint, oracle, tmp_path, max_batch_tokens, disable_overlap_schedule
) -> None:
    """Requests that ask for different things share their steps; prompts are cut into chunks; all of it is committed."""
    options = {"max_batch_tokens": max_batch_tokens, "disable_overlap_schedule": disable_overlap_schedule}
    with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", traces=tmp_path / "t", **options) as client:
        prompts = [prompt for prompt in PROMPTS for _ in VARIANTS]
        traces = client.sample(prompts, sampling_params=VARIANTS * len(PROMPTS))
    for trace, params in zip(traces, VARIANTS * len(PROMPTS), strict=True):
        check(oracle, trace, params)
    dataset = TraceDataset(tmp_path / "t")
    assert all(dataset[trace.sample_id] == trace for trace in traces)
    assert dataset.verify() == []


def test_the_sampled_token_has_the_same_logprob_among_the_most_likely(checkpoint) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3, logprobs=160, temperature=0.8, top_p=0.9)
    with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32") as client:
        n = min(160, client.info.vocab_size)
        (trace,) = client.sample([[5, 9]], sampling_params=params.model_copy(update={"logprobs": n}))
    for at, token in enumerate(trace.completion_ids):
        place = trace.top_ids[at].tolist().index(token)
        assert trace.top_logprobs[at, place] == trace.logprobs[at]
        assert trace.raw_top_logprobs[at, place] == trace.raw_logprobs[at]


def test_a_prompt_only_request_gives_the_logprobs_of_its_prompt(checkpoint, oracle) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, logit_bias={9: 3.0}, allowed_token_ids=(9, 11, 13))
    with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32") as client:
        (trace,) = client.sample([[5, 9, 11]], sampling_params=params)
    rows = oracle.forward([5, 9, 11]).logits
    expected = np.full_like(rows, -np.inf)
    expected[:, [9, 11, 13]] = rows[:, [9, 11, 13]] + np.array([3.0, 0, 0])
    assert trace.finish_reason == "length"
    np.testing.assert_allclose(
        trace.prompt_logprobs, [log_softmax(expected[i])[t] for i, t in enumerate([9, 11])], atol=1e-5
    )
    np.testing.assert_allclose(
        trace.raw_prompt_logprobs, [log_softmax(rows[i])[t] for i, t in enumerate([9, 11])], atol=1e-5
    )


def test_bitwise_in_any_chunks_in_batch_invariant_mode(checkpoint) -> None:
    found = []
    for options in ({}, {"max_batch_tokens": 3, "disable_overlap_schedule": True}):
        with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", batch_invariant=True, **options) as client:
            found.append(client.sample(PROMPTS, num_samples=2, sampling_params=VARIANTS[0]))
    assert found[0] == found[1]
