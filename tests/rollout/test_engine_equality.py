"""The engine against plain transformers in fp32: greedy tokens, routes and log-probabilities."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from tests.rollout.oracle import FAMILIES, Oracle, check_trace, mostly, tokens_agree

LENGTHS = (1, 5, 33, 2, 17, 48, 9, 7, 1, 12, 3, 26, 8, 14, 4, 21)
MAX_TOKENS = 16
LONGEST = max(LENGTHS) + MAX_TOKENS
EOS = 2
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

family = pytest.mark.parametrize("family", FAMILIES)


def prompts(count):
    rng = np.random.default_rng(7)
    lengths = itertools.islice(itertools.cycle(LENGTHS), count)
    return [rng.integers(3, 96, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return cache(lambda family, **overrides: Oracle(checkpoint(family, **overrides)))


@pytest.fixture(scope="module")
def expected(oracle):
    """`model.generate` of the 32 prompts, each alone."""
    return cache(lambda family: [oracle(family).greedy(prompt, MAX_TOKENS) for prompt in prompts(32)])


@pytest.fixture
def client(checkpoint):
    """`client(family, **engine_options)`; closed after the test."""
    opened = []

    def open_client(family, **options):
        opened.append(RolloutClient.local(checkpoint(family), **options))
        return opened[-1]

    yield open_client
    for each in opened:
        each.close()


def check_against(oracle, traces, expected):
    """Tokens equal generate, then routes and logprobs equal one forward of the finished sequence."""
    agreed = []
    for trace, completion in zip(traces, expected, strict=False):
        same = tokens_agree(oracle, trace.prompt_ids, trace.completion_ids, completion)
        assert not same or trace.finish_reason == ("stop" if completion[-1] == EOS else "length")
        agreed += [same, check_trace(oracle, trace)]
    assert mostly(agreed)


def batch(size, chunk=2048, kv_tokens=None):
    return {"size": size, "max_batch_tokens": chunk, "kv_tokens": kv_tokens}


# kv_tokens=LONGEST holds the longest request alone: all others wait for it.
REPRESENTATIVE = [
    batch(1),
    batch(2, chunk=1),
    batch(5, chunk=7, kv_tokens=LONGEST),
    batch(16, chunk=7),
    batch(32),
    batch(32, kv_tokens=2 * LONGEST),
]
ALL = [batch(*case) for case in itertools.product((1, 2, 8, 32), (1, 7, 2048), (None, LONGEST, 2 * LONGEST))]


def case_id(case):
    return "-".join(str(value) for value in case.values())


@family
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case_id(case)) for case in REPRESENTATIVE),
        *(pytest.param(case, id=f"{case_id(case)}-full", marks=pytest.mark.full) for case in ALL),
    ],
)
@pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])
def test_greedy_equals_generate(family, case, overlap_off, client, oracle, expected):
    options = {key: value for key, value in case.items() if key != "size"}
    engine = client(family, disable_overlap_schedule=overlap_off, max_running_requests=32, **options)
    traces = engine.sample(prompts(case["size"]), sampling_params=GREEDY)
    check_against(oracle(family), traces, expected(family))


@family
@pytest.mark.parametrize("chunk", [3, 2048])
@pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])
def test_the_shortest_requests_have_every_row(family, chunk, overlap_off, client, oracle):
    """One-token prompts, one-token completions and prompt-only requests, mixed in one batch."""
    asked = [([5], 0), ([5], 1), ([5, 6, 7, 8], 0), ([9, 8, 7, 6, 5], 1), ([4], 6)]
    engine = client(family, max_batch_tokens=chunk, disable_overlap_schedule=overlap_off)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in asked]
    traces = engine.sample([prompt for prompt, _ in asked], sampling_params=params)
    for trace, (prompt, count) in zip(traces, asked, strict=True):
        assert (trace.finish_reason, len(trace.completion_ids)) == ("length", count)
        assert len(trace.routed_experts) == len(prompt) + max(count - 1, 0)
        assert tokens_agree(oracle(family), prompt, trace.completion_ids, _forced(oracle(family), prompt, count))
        assert check_trace(oracle(family), trace)


def _forced(oracle, prompt, count):
    """Greedy without an end token."""
    return oracle.greedy(prompt, count, eos_token_id=None) if count else []


@family
@pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])
def test_an_end_token_at_once(family, overlap_off, client, oracle, checkpoint):
    """The same weights with the first greedy token as end token: one token, one row per prompt token."""
    prompt = [5, 6, 7, 8, 9]
    first = oracle(family).greedy(prompt, 1)[0]
    path = checkpoint(family, eos_token_id=first)
    with RolloutClient.local(path, disable_overlap_schedule=overlap_off) as engine:
        trace = engine.sample([prompt], sampling_params=GREEDY)[0]
    assert (trace.completion_ids, trace.finish_reason, trace.stop_reason) == ([first], "stop", None)
    assert len(trace.routed_experts) == 5
    assert check_trace(oracle(family), trace)


def test_stop_token_ids_and_min_tokens(client, oracle):
    """A named stop token is reported as the reason; before min_tokens it may not be drawn."""
    truth, prompt = oracle("mixtral"), [5, 6, 7]
    plain = truth.greedy(prompt, 8)
    stop = plain[2]
    params = [
        SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,)),
        SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(stop,), min_tokens=6),
    ]
    early, late = client("mixtral").sample([prompt, prompt], sampling_params=params)
    end = plain.index(stop) + 1
    assert (early.completion_ids, early.stop_reason) == (plain[:end], stop)
    suppressed = truth.greedy(prompt, 8, eos_token_id=[EOS, stop], min_new_tokens=6)
    assert tokens_agree(truth, prompt, late.completion_ids, suppressed)
    assert stop not in late.completion_ids[:6]
    assert all(check_trace(truth, trace) for trace in (early, late))


FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"min_p": 0.02, "top_k": 20, "top_p": 0.9},
}


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe"])
def test_logprobs_are_those_of_the_distribution_drawn_from(family, temperature, filters, client, oracle):
    params = SamplingParams(temperature=temperature, max_tokens=12, seed=3, ignore_eos=True, **filters)
    traces = client(family, max_batch_tokens=40).sample(prompts(8), num_samples=2, sampling_params=params)
    assert mostly([check_trace(oracle(family), trace) for trace in traces])
    equal = [np.array_equal(trace.logprobs, trace.raw_logprobs) for trace in traces]
    assert all(equal) == (temperature == 0 or (temperature == 1 and not filters))


def test_neighbours_with_other_parameters_do_not_mix(client, oracle):
    """One batch with every combination of temperature and filter."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=12, seed=4, **filters)
        for temperature in (0.0, 0.7, 1.0, 1.3)
        for filters in FILTERS.values()
    ]
    traces = client("olmoe").sample(prompts(len(params)), sampling_params=params)
    assert mostly([check_trace(oracle("olmoe"), trace) for trace in traces])


def test_without_capture_routes_are_absent_and_tokens_the_same(client, expected, oracle):
    engine = client("qwen2_moe", enable_return_routed_experts=False)
    traces = engine.sample(prompts(4), sampling_params=GREEDY)
    assert [trace.routed_experts for trace in traces] == [None] * 4
    for trace, completion in zip(traces, expected("qwen2_moe"), strict=False):
        assert tokens_agree(oracle("qwen2_moe"), trace.prompt_ids, trace.completion_ids, completion)


WAYS = {
    "transformers' eager": {"experts_implementation": "eager"},
    "transformers' grouped_mm": {"experts_implementation": "grouped_mm"},
    "transformers' batched_mm": {"experts_implementation": "batched_mm"},
    "torch's kernels": {"native_kernels": False},
    "our kernels": {"native_kernels": True},
    "our kernels, two threads": {"native_kernels": True, "num_threads": 2},
    "batch invariant": {"batch_invariant": True},
    "batch invariant, torch's kernels": {"batch_invariant": True, "native_kernels": False},
}
RARE = [pytest.param(family, marks=pytest.mark.full) for family in FAMILIES if family != "qwen3_moe"]


@pytest.mark.parametrize("family", ["qwen3_moe", *RARE])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compute_is_exact(family, way, client, oracle, expected):
    engine = client(family, **WAYS[way])
    check_against(oracle(family), engine.sample(prompts(8), sampling_params=GREEDY), expected(family))
