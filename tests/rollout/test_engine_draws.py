"""Each sampled token is the one that its own random number picks from the plain model's distribution.

The random number is computed here with Python integers, the distribution with float64 from transformers' logits, so a
stream that is shared between samples, shifted by a position or drawn from the wrong row would show at once.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from storage import Trace
from tests.rollout.oracle import Oracle

MASK = 2**64 - 1
BOUNDARY = 1e-5  # a draw this close to the edge between two tokens may fall on either side in float32


def reference_uniform(seed: int, counter: str, position: int) -> float:
    """SplitMix64 over a key that is a hash of seed, step, prompt key and sample; 24 bits."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{counter}".encode(), digest_size=8).digest(), "little")
    x = (key + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return ((x ^ (x >> 31)) >> 40) * 2.0**-24


def check_draws(oracle: Oracle, trace: Trace, temperature: float) -> int:
    """Compare every token; how many were compared."""
    logits = oracle.forward(trace.token_ids).logits[len(trace.prompt_ids) - 1 : -1] / temperature
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    edges = np.cumsum(probs / probs.sum(-1, keepdims=True), axis=-1)
    counter = trace.sample_id.partition("/")[2]
    for position, token in enumerate(trace.completion_ids):
        u = reference_uniform(trace.seed, counter, position)
        if np.abs(edges[position] - u).min() > BOUNDARY:
            assert token == int(np.searchsorted(edges[position], u, side="right")), (trace.sample_id, position)
    return len(trace.completion_ids)


@pytest.mark.parametrize("max_batch_tokens", [5, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_token_is_the_draw_of_its_own_number(checkpoint, max_batch_tokens, temperature) -> None:
    path = checkpoint("qwen3_moe")
    params = SamplingParams(temperature=temperature, max_tokens=16, ignore_eos=True, seed=5)
    prompts = [[5, 9, 11], [7], [20, 3, 44, 60, 13, 8]]
    with RolloutClient.local(path, dtype="float32", max_batch_tokens=max_batch_tokens) as client:
        traces = client.sample(prompts, num_samples=3, sampling_params=params, step=4)
    oracle = Oracle(path)
    assert sum(check_draws(oracle, trace, temperature) for trace in traces) == 9 * 16
    assert len({tuple(trace.completion_ids) for trace in traces}) == 9
