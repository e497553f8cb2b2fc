"""A full pool: the youngest request yields, and what it recomputes later goes the way it went the first time.

Between yielding and coming back the selection of all routers is flipped. A run that never yields, flipped at the same
step, says what must come out: the rows from before stay, and the logits behind them are the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from tests.families import save_tiny
from tests.rollout.flipped import flipped_at_first_preemption, flipped_selection
from tests.rollout.oracle import Oracle, check_trace
from tests.rollout.probes import assert_all_free, parts_of, prompts

SAMPLED = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True, seed=3)
TIGHT = {"kv_tokens": 80, "max_running_requests": 2}
modes = pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])


def sample(client):
    return client.sample(prompts(2, length=20), sampling_params=SAMPLED, step=0)


def yielding(path, **options):
    """Traces of a run in which the second request yields, the step of that, and how many tokens it computed."""
    with RolloutClient.local(path, **TIGHT, **options) as client:
        with flipped_at_first_preemption(client) as flip:
            traces = sample(client)
        assert parts_of(client)[1].preemptions == 1
        assert_all_free(client, 2)
        return traces, flip.from_step, client.backend.stats.tokens


def never_yielding(path, from_step, **options):
    with RolloutClient.local(path, max_running_requests=2, **options) as client:
        with flipped_selection(client, from_step):
            traces = sample(client)
        assert parts_of(client)[1].preemptions == 0
        return traces, client.backend.stats.tokens


def check_equal(found, truth, batch_invariant, tolerance=1e-5):
    for trace, expected in zip(found, truth, strict=True):
        assert trace.completion_ids == expected.completion_ids
        assert np.array_equal(trace.routed_experts, expected.routed_experts)
        for name in ("raw_logprobs", "logprobs"):
            found_values, values = getattr(trace, name), getattr(expected, name)
            if batch_invariant:
                assert found_values.tobytes() == values.tobytes()
            else:
                assert np.abs(found_values - values).max() < tolerance


@modes
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_what_is_recomputed_follows_its_frozen_rows(checkpoint, batch_invariant, overlap_off):
    options = {"batch_invariant": batch_invariant, "disable_overlap_schedule": overlap_off}
    path = checkpoint("qwen3_moe")
    found, at, computed = yielding(path, **options)
    truth, alone = never_yielding(path, at, **options)
    check_equal(found, truth, batch_invariant)
    assert computed - alone > 20, "the prompt, and what was sampled before, was computed again"
    plain, _ = never_yielding(path, None, **options)
    rows = 20 + at - 1  # of the prompt, and one per decode before the flip
    assert np.array_equal(found[1].routed_experts[:rows], plain[1].routed_experts[:rows])
    assert (found[1].routed_experts[rows] != plain[1].routed_experts[rows]).any(), "the double does change the choice"


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",  # latents in the pool
        "jetmoe",  # routers that are watched, not hooked
        "jamba",  # states
        "minimax",  # states of a class of its own
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("gpt_oss", "deepseek_v2", "phimoe", "lfm2_moe", "qwen3_next", "longcat_flash", "zaya")
        ),
    ],
)
def test_families_that_keep_something_else(family, tmp_path):
    path = save_tiny(family, tmp_path)
    options = {"dtype": "float32", "max_batch_tokens": 24}
    found, at, _ = yielding(path, **options)
    truth, _ = never_yielding(path, at, **options)
    # state layers compute a prompt and a single token with other algorithms, and these weights are wide
    check_equal(found, truth, batch_invariant=False, tolerance=1e-4)


def test_many_requests_in_a_small_pool_are_those_of_plain_transformers(checkpoint):
    """Requests that yield twice and more; rows, tokens and logprobs against one forward each."""
    path = checkpoint("olmoe")
    oracle = Oracle(path)
    with RolloutClient.local(path, kv_tokens=100, max_running_requests=6, max_batch_tokens=16) as client:
        traces = client.sample(prompts(12, length=9), sampling_params=SAMPLED)
        assert parts_of(client)[1].preemptions > 3
        assert_all_free(client, 6)
    assert [len(trace.completion_ids) for trace in traces] == [30] * 12
    agreed = [check_trace(oracle, trace) for trace in traces]
    assert sum(agreed) >= 10
    assert {tuple(trace.weight_versions) for trace in traces} == {((0, 0, 38),)}


def test_random_numbers_go_on_where_they_were(checkpoint):
    path = checkpoint("mixtral")
    sampled = {}
    for kv_tokens in (None, 60):
        with RolloutClient.local(path, batch_invariant=True, kv_tokens=kv_tokens, max_running_requests=4) as client:
            traces = client.sample(prompts(4), num_samples=2, sampling_params=SAMPLED, step=0)
            sampled[kv_tokens] = [(t.completion_ids, t.raw_logprobs.tobytes()) for t in traces]
    assert sampled[None] == sampled[60]
