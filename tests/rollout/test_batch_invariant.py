"""batch_invariant=True: a trace is the same in every bit whatever the batch, the chunks, the overlap or the threads."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from tests.rollout.oracle import FAMILIES, Oracle, check_trace, mostly, tokens_agree

LENGTHS = (1, 23, 5, 17, 2, 40, 9, 3, 12, 30, 7)
COUNT = 31
PROMPTS = [
    np.random.default_rng(index).integers(3, 96, length).tolist()
    for index, length in zip(range(COUNT), itertools.cycle(LENGTHS), strict=False)
]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=5)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def sample(path, groups, params=SAMPLED, **options):
    """Each group of prompt indices in one call; {index: trace}. Sample ids, and so random numbers, follow the index."""
    with RolloutClient.local(path, batch_invariant=True, **options) as client:
        traces = {}
        for group in groups:
            prompts, keys = [PROMPTS[i] for i in group], [f"p{i}" for i in group]
            found = client.sample(prompts, sampling_params=params, prompt_keys=keys, step=0)
            traces.update(zip(group, found, strict=True))
    return traces


def bits(trace):
    """Everything that must not change, floats by their bytes."""
    floats = (trace.logprobs.tobytes(), trace.raw_logprobs.tobytes())
    return (
        trace.sample_id,
        trace.token_ids,
        floats,
        trace.routed_experts.tolist(),
        trace.finish_reason,
        trace.stop_reason,
    )


def assert_identical(found, alone):
    for index, trace in found.items():
        assert bits(trace) == bits(alone[index]), f"prompt {index} changed"


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Every prompt in a batch of its own, whole, without overlap."""

    @cache
    def run(family, params):
        groups = [[index] for index in range(COUNT)]
        return sample(checkpoint(family), groups, params, disable_overlap_schedule=True)

    return run


def groups_of(size):
    return [list(range(start, min(start + size, COUNT))) for start in range(0, COUNT, size)]


@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("size", [2, 5, 31])
def test_in_batches(size, params, checkpoint, alone):
    assert_identical(sample(checkpoint("qwen3_moe"), groups_of(size), params), alone("qwen3_moe", params))


def test_beside_other_neighbours(checkpoint, alone):
    groups = [[9, 0, 20, 3], [0, 30], [4, 3, 2, 1, 0], [0, 5, 5 + 11]]
    for group in groups:
        assert_identical(sample(checkpoint("qwen3_moe"), [group]), alone("qwen3_moe", SAMPLED))


@pytest.mark.parametrize("chunk", [1, 7, 16, 2048])
@pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])
def test_with_other_chunks_and_without_overlap(chunk, overlap_off, checkpoint, alone):
    found = sample(checkpoint("qwen3_moe"), groups_of(11), max_batch_tokens=chunk, disable_overlap_schedule=overlap_off)
    assert_identical(found, alone("qwen3_moe", SAMPLED))


def test_when_slots_are_scarce_and_reused(checkpoint, alone):
    """Requests wait for each other and take over each other's slots."""
    found = sample(checkpoint("qwen3_moe"), [list(range(COUNT))[::-1]], kv_tokens=64, max_running_requests=3)
    assert_identical(found, alone("qwen3_moe", SAMPLED))


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families(family, checkpoint, alone):
    found = sample(checkpoint(family), groups_of(16), max_batch_tokens=37)
    assert_identical(found, alone(family, SAMPLED))


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 5, 31])
@pytest.mark.parametrize("chunk", [1, 7, 2048])
@pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])
def test_everything_with_everything(family, size, chunk, overlap_off, checkpoint, alone):
    found = sample(checkpoint(family), groups_of(size), max_batch_tokens=chunk, disable_overlap_schedule=overlap_off)
    assert_identical(found, alone(family, SAMPLED))


def test_one_and_two_threads(checkpoint):
    """A wider model, so that a matrix product has enough rows and columns to be split between threads."""
    path = checkpoint("qwen3_moe", hidden_size=256, vocab_size=1024, moe_intermediate_size=128)
    params, group = SAMPLED.model_copy(update={"max_tokens": 6}), [0, 1, 2, 3]
    one = sample(path, [[index] for index in group], params, num_threads=1)
    assert_identical(sample(path, [group], params, num_threads=2, max_batch_tokens=7), one)
    assert_identical(sample(path, [group], params, num_threads=2), one)


def test_the_mode_is_also_right(checkpoint, alone):
    """Identical is not enough: the traces are those of plain transformers."""
    oracle = Oracle(checkpoint("qwen3_moe"))
    traces = alone("qwen3_moe", GREEDY).values()
    tokens = [tokens_agree(oracle, t.prompt_ids, t.completion_ids, oracle.greedy(t.prompt_ids, 12)) for t in traces]
    assert mostly(tokens)
    assert mostly([check_trace(oracle, trace) for trace in traces])


def test_the_stock_kernels_do_depend_on_the_batch(checkpoint):
    """The reason for the mode, and the proof that `bits` can see a difference in the last place."""
    path = checkpoint("qwen3_moe")
    with RolloutClient.local(path) as client:
        together = client.sample(PROMPTS, sampling_params=GREEDY)
        one_by_one = [client.sample([prompt], sampling_params=GREEDY)[0] for prompt in PROMPTS]
    pairs = zip(together, one_by_one, strict=True)
    assert any(a.raw_logprobs.tobytes() != b.raw_logprobs.tobytes() for a, b in pairs)
