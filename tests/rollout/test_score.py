"""client.score: teacher-forced logprobs and routes against plain transformers, what was sampled, and RouterReplay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, RouterReplay, SamplingParams
from storage import ReplayBatch
from tests.rollout.oracle import Oracle, log_distribution, log_softmax, routes_agree

PROMPTS = [[5, 9, 11], [7], [20, 3, 44, 60, 13, 8, 8, 2, 30]]
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True, seed=4, temperature=0.8)


@pytest.fixture(scope="module")
def client(checkpoint):
    with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", max_batch_tokens=16) as client:
        yield client


def test_logprobs_and_routes_are_those_of_the_plain_forward(client, checkpoint) -> None:
    oracle = Oracle(checkpoint("qwen3_moe"))
    sequences = [[5, 9], [7, 8, 9, 10, 11, 30, 2], list(range(20, 60))]
    params = SamplingParams(temperature=0.7, top_k=20)
    for tokens, score in zip(sequences, client.score(sequences, sampling_params=params), strict=True):
        truth = oracle.forward(tokens)
        pairs = list(zip(truth.logits, tokens[1:], strict=False))
        np.testing.assert_allclose(score.raw_logprobs, [log_softmax(row)[token] for row, token in pairs], atol=1e-5)
        expected = [log_distribution(row, params)[token] for row, token in pairs]
        np.testing.assert_allclose(score.logprobs, expected, atol=2e-5)
        assert score.token_ids == tokens
        assert score.routed_experts.shape[0] == len(tokens) - 1
        assert routes_agree(truth, score.routed_experts)


@pytest.mark.parametrize("replay", [False, True])
def test_what_was_sampled_is_scored_to_the_same_bits_in_batch_invariant_mode(checkpoint, replay) -> None:
    options = {"dtype": "float32", "batch_invariant": True, "max_batch_tokens": 7}
    with RolloutClient.local(checkpoint("qwen3_moe"), **options) as client:
        traces = client.sample(PROMPTS, num_samples=2, sampling_params=PARAMS)
        scores = client.score(traces, replay=replay)
    for trace, score in zip(traces, scores, strict=True):
        assert score.completion_logprobs.tobytes() == trace.raw_logprobs.tobytes()
        assert score.routed_experts.tobytes() == trace.routed_experts.tobytes()


def test_replay_takes_the_recorded_experts_whatever_the_model_would_choose(client, checkpoint) -> None:
    """Other experts than the model's; the truth is RouterReplay on the plain model."""
    (trace,) = client.sample([PROMPTS[2]], sampling_params=PARAMS)
    sites = client.info.spec.sites
    trace.routed_experts = ((trace.routed_experts.astype(int) + 1) % sites[0].num_experts).astype(np.uint8)
    (forced,), (free,) = client.score([trace], replay=True), client.score([trace])
    assert np.array_equal(forced.routed_experts, trace.routed_experts)
    assert not np.array_equal(free.routed_experts, trace.routed_experts)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), dtype=torch.float32).eval()
    batch = ReplayBatch.collate([trace], spec=client.info.spec, padding="right")
    with torch.no_grad(), RouterReplay(model)(batch):
        logits = model(**batch.model_inputs()).logits[0].double().numpy()
    expected = [log_softmax(row)[token] for row, token in zip(logits, trace.token_ids[1:], strict=False)]
    np.testing.assert_allclose(forced.raw_logprobs, expected, atol=1e-5)
    assert np.abs(forced.raw_logprobs - free.raw_logprobs).max() > 1e-3


def test_scoring_writes_no_step_and_draws_nothing(checkpoint, tmp_path) -> None:
    with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", traces=tmp_path / "t") as client:
        client.score([[5, 9]])
        (trace,) = client.sample([[5, 9]], sampling_params=PARAMS)
    assert trace.step == 0


def test_bad_sequences_are_named_by_index_and_nothing_runs(client) -> None:
    (trace,) = client.sample([[5, 9]], sampling_params=PARAMS)
    forwards = client.backend.stats.forwards
    for sequences, replay, message in [
        ([[5, 9], [5]], False, "sequence 1 has 1 token"),
        ([[5, 9], [5, 10**6]], False, "prompt 1 has token id 1000000, outside"),
        ([trace, [5, 9]], True, "sequence 1 holds no routes to replay"),
    ]:
        with pytest.raises(ValueError, match=message):
            client.score(sequences, replay=replay)
    trace.routed_experts = trace.routed_experts[:, :1]
    with pytest.raises(ValueError, match=r"sequence 0 \(run/.*\): routed_experts has shape"):
        client.score([trace], replay=True)
    with pytest.raises(ValueError, match="prompt_logprobs with penalties"):
        client.score([[5, 9]], sampling_params=SamplingParams(presence_penalty=1.0))
    assert client.backend.stats.forwards == forwards


def test_replay_without_recording_is_refused_by_name(checkpoint) -> None:
    with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", enable_return_routed_experts=False) as client:
        assert client.score([[5, 9]])[0].routed_experts is None
        with pytest.raises(ValueError, match="replay=True needs enable_return_routed_experts=True"):
            client.score([[5, 9]], replay=True)
