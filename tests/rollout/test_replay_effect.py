"""What replay is for: the trainer agrees with a bfloat16 sampler, token by token, on the built-in model.

Pooled over some 7,000 sampled tokens: single tokens that are far off make up most of the native KL, so few are not
enough. k3 is Schulman's estimator of KL(sampler | trainer).
"""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, RouterReplay, SamplingParams
from rollout.tiny_moe import MAX_ANSWER_TOKENS, MODEL_PATH, problems
from storage import ReplayBatch

SUMS = [problem.prompt for problem in problems(256, seed=0)]


def sample(dtype):
    params = SamplingParams(temperature=1.0, max_tokens=MAX_ANSWER_TOKENS, seed=3)
    with RolloutClient.local(MODEL_PATH, dtype=dtype) as client:
        return client.sample(SUMS, num_samples=8, sampling_params=params)


@pytest.fixture(scope="module")
def trainer():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)


@pytest.fixture(scope="module")
def sampled_in_bfloat16():
    return sample("bfloat16")


@torch.no_grad()
def difference(trainer, batch, forced=None):
    """Trainer minus sampler of every sampled token: natively, or with the routes of `forced`."""

    def forward():
        logprobs = batch.token_logprobs(trainer(**batch.model_inputs()).logits).numpy()
        return (logprobs - batch.logprobs)[batch.completion_mask]

    if forced is None:
        return forward()
    with RouterReplay(trainer)(forced):
        return forward()


def k3(difference):
    return float(np.mean(np.exp(difference) - 1 - difference))


def flipped_share(trainer, batch):
    """Counted by hand: recorded rows of which the plain forward takes another set of experts in some layer."""
    chosen = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2].numpy()))
        for layer in trainer.model.layers
    ]
    with torch.no_grad():
        trainer(**batch.model_inputs())
    for hook in hooks:
        hook.remove()
    own = np.stack(chosen, axis=1)
    recorded = batch.routed_experts.reshape(own.shape)
    flipped = (np.sort(own, -1) != np.sort(recorded, -1)).any((1, 2))
    return flipped[batch.route_mask.ravel()].mean()


def test_replay_divides_the_kl_to_a_bfloat16_sampler_by_three_at_least(trainer, sampled_in_bfloat16):
    batch = ReplayBatch.collate(sampled_in_bfloat16, spec=RouterReplay(trainer).spec)
    assert batch.completion_mask.sum() >= 1500
    assert flipped_share(trainer, batch) > 0.02
    native, replayed = difference(trainer, batch), difference(trainer, batch, batch)
    assert k3(replayed) <= k3(native) / 3
    assert np.abs(replayed).mean() < np.abs(native).mean()
    assert np.abs(replayed).max() < np.abs(native).max()


def test_a_float32_sampler_and_the_trainer_agree_and_no_expert_flips(trainer):
    batch = ReplayBatch.collate(sample("float32"), spec=RouterReplay(trainer).spec)
    assert flipped_share(trainer, batch) == 0
    assert np.abs(difference(trainer, batch)).max() < 1e-5
    assert np.abs(difference(trainer, batch, batch)).max() < 1e-5


def test_the_routes_of_another_sample_make_it_worse(trainer, sampled_in_bfloat16):
    batch = ReplayBatch.collate(sampled_in_bfloat16, spec=RouterReplay(trainer).spec)
    neighbours = dataclasses.replace(
        batch,
        routed_experts=np.roll(batch.routed_experts, 8, axis=0),
        route_mask=batch.route_mask & np.roll(batch.route_mask, 8, axis=0),
    )
    assert k3(difference(trainer, batch, neighbours)) > 10 * k3(difference(trainer, batch))
