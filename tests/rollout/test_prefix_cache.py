"""Prompts that begin alike are computed once, and nobody can tell from the traces."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from tests.families import save_tiny
from tests.rollout.flipped import flipped_selection
from tests.rollout.oracle import Oracle, check_trace, mostly
from tests.rollout.probes import before_forward, greedy, parts_of, wait_until
from tests.rollout.test_pause import Sampling

SAMPLED = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, seed=3)
COMMON = np.random.default_rng(0).integers(3, 96, 40).tolist()
PROMPTS = [COMMON, COMMON[:17], [*COMMON, 5, 6, 7], [*COMMON[:30], 9, 9], [8, *COMMON], COMMON[:1]]
modes = pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("qwen3_moe")


def bits(trace):
    floats = trace.logprobs.tobytes(), trace.raw_logprobs.tobytes()
    return trace.sample_id, trace.token_ids, floats, trace.routed_experts.tolist(), trace.weight_versions


@contextlib.contextmanager
def poisoned(client):
    """Freed slots hold large numbers instead of zeros: whoever reads one shows it."""
    pool = client.backend._built.runner.pool

    def poison(slot, count):
        for store in (*pool.keys.values(), *pool.values.values()):
            store[slot : slot + count] = 1e4

    pool.clear = poison
    yield client


def sample_twice(path, **options):
    with RolloutClient.local(path, **options) as client, poisoned(client):
        traces = client.sample(PROMPTS, num_samples=3, sampling_params=SAMPLED, step=0)
        traces += client.sample(PROMPTS, num_samples=2, sampling_params=SAMPLED, step=1)
        wait_until(lambda: parts_of(client)[0].idle)
        parts_of(client)[1].check()
        return traces, client.backend.stats


@modes
@pytest.mark.parametrize(("kv_tokens", "chunk"), [(150, 7), (None, 2048)])
def test_the_same_traces_with_and_without_it(path, overlap_off, kv_tokens, chunk):
    options = {
        "batch_invariant": True,
        "disable_overlap_schedule": overlap_off,
        "kv_tokens": kv_tokens,
        "max_batch_tokens": chunk,
        "max_running_requests": 4,
    }
    without, plain = sample_twice(path, **options)
    found, stats = sample_twice(path, prefix_cache=True, **options)
    assert [bits(trace) for trace in found] == [bits(trace) for trace in without]
    assert (plain.cached_tokens, stats.cached_tokens > 0) == (0, True)
    assert stats.tokens < plain.tokens


def test_by_default_the_traces_are_those_of_plain_transformers(path):
    traces, stats = sample_twice(path, prefix_cache=True)
    assert mostly([check_trace(Oracle(path), trace) for trace in traces])
    assert stats.cached_tokens > 500


@modes
@pytest.mark.parametrize("capture", [True, False])
def test_the_samples_of_one_prompt_compute_it_once(path, overlap_off, capture):
    options = {"disable_overlap_schedule": overlap_off, "enable_return_routed_experts": capture}
    with RolloutClient.local(path, prefix_cache=True, max_running_requests=8, **options) as client:
        client.sample([COMMON], num_samples=8, sampling_params=SAMPLED)
        decodes = 8 * 11
        assert client.backend.stats.tokens == 40 + 7 * 1 + decodes, "the others compute its last token only"
        assert client.backend.stats.cached_tokens == 7 * 39


def test_a_conversation_goes_on_from_what_its_last_turn_left(path):
    with RolloutClient.local(path, prefix_cache=True) as client:
        (first,) = client.sample([COMMON], sampling_params=SAMPLED)
        before = client.backend.stats.tokens
        client.sample([[*first.token_ids, 5, 6, 7]], sampling_params=greedy(1))
        assert client.backend.stats.tokens - before == 1 + 3, "the last sampled token, and the new ones"


def test_a_hit_brings_the_routes_that_its_keys_and_values_were_computed_with(path):
    """The selection is flipped between the two calls: rows and logits of the hit are still those of the first."""
    with RolloutClient.local(path, prefix_cache=True, batch_invariant=True) as client:
        (first,) = client.sample([COMMON], sampling_params=greedy(3))
        with flipped_selection(client, 0):
            (second,) = client.sample([[*COMMON, 5]], sampling_params=greedy(3))
    with RolloutClient.local(path, batch_invariant=True) as client:
        (alone,) = client.sample([[*COMMON, 5]], sampling_params=greedy(3))
    assert np.array_equal(second.routed_experts[:40], first.routed_experts[:40])
    assert not np.array_equal(second.routed_experts[40:], alone.routed_experts[40:])


def test_no_hit_crosses_an_update(path):
    with RolloutClient.local(path, prefix_cache=True, batch_invariant=True) as client:
        client.sample([COMMON], sampling_params=SAMPLED, step=0)
        weights = {name: tensor * 1.02 for name, tensor in parts_of(client)[2].state_dict().items()}
        client.update_weights(weights, version=1)
        assert parts_of(client)[1].slots.free_slots == parts_of(client)[1].slots.size
        (found,) = client.sample([COMMON], sampling_params=SAMPLED, step=1)
        assert client.backend.stats.cached_tokens == 0
        assert {span.version for span in found.weight_versions} == {1}


@modes
def test_a_group_goes_on_when_the_one_that_computes_its_prompt_is_aborted(path, overlap_off):
    options = {"batch_invariant": True, "max_batch_tokens": 8, "disable_overlap_schedule": overlap_off}
    with RolloutClient.local(path, **options) as client:
        expected = client.sample([COMMON], num_samples=3, sampling_params=SAMPLED, step=0)
    with RolloutClient.local(path, prefix_cache=True, **options) as client, poisoned(client):
        client.pause()
        sampling = Sampling(client, [COMMON], num_samples=3, sampling_params=SAMPLED, step=0)
        wait_until(lambda: len(list(parts_of(client)[1].requests())) == 3)
        with before_forward(client, lambda n: client.abort(["run/0/0-0/0"]) if n == 1 else None):
            client.resume()
            sampling.join()
    assert sampling.traces[0].finish_reason == "abort"
    assert [bits(trace) for trace in sampling.traces[1:]] == [bits(trace) for trace in expected[1:]]


def test_prompt_logprobs_are_computed_even_where_keys_and_values_are_not_needed(path):
    """Their prompt is in the cache already; the values are those of an engine without one, bit for bit."""
    params, found = SAMPLED.model_copy(update={"prompt_logprobs": 2}), {}
    for prefix_cache in (False, True):
        with RolloutClient.local(path, prefix_cache=prefix_cache, batch_invariant=True) as client:
            client.sample([COMMON], sampling_params=SAMPLED, step=0)
            traces = client.sample([COMMON], num_samples=2, sampling_params=params, step=1)
            assert client.backend.stats.cached_tokens == 0
        found[prefix_cache] = [(t.prompt_logprobs.tobytes(), t.prompt_top_ids.tolist(), bits(t)) for t in traces]
        assert [trace.prompt_logprobs.shape for trace in traces] == [(39,), (39,)]
    assert found[True] == found[False]


def test_keys_and_values_that_other_rows_computed_do_not_serve_a_recorded_trace(path):
    """The cache holds the trace's tokens under native experts; the trace recorded the least likely ones."""
    with RolloutClient.local(path, batch_invariant=True) as client, flipped_selection(client, 0):
        (recorded,) = client.sample([COMMON], sampling_params=SAMPLED, step=0)
    more, found = SAMPLED.model_copy(update={"max_tokens": 20}), {}
    for prefix_cache in (False, True):
        with RolloutClient.local(path, prefix_cache=prefix_cache, batch_invariant=True) as client:
            client.sample([recorded.token_ids], sampling_params=greedy(1), step=0)
            (trace,) = client.sample(resume=[recorded], sampling_params=more, step=1)
            assert client.backend.stats.cached_tokens == 0
        found[prefix_cache] = bits(trace)
    assert found[True] == found[False]


def test_latents_are_copied_too(tmp_path):
    path = save_tiny("deepseek_v3", tmp_path)
    options = {"batch_invariant": True, "dtype": "float32"}
    assert [bits(trace) for trace in sample_twice(path, prefix_cache=True, **options)[0]] == [
        bits(trace) for trace in sample_twice(path, **options)[0]
    ]


def test_states_cannot_be_found_by_prefix(tmp_path):
    with pytest.raises(ValueError, match="prefix_cache=True is not available for JambaForCausalLM: its layers carry"):
        RolloutClient.local(save_tiny("jamba", tmp_path), dtype="float32", prefix_cache=True)
