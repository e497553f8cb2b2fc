"""The sampler draws from the right distribution, and a row never notices its neighbours."""

import hashlib
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from rollout.rng import stream_key, uniforms
from rollout.sampler import SamplingBatch, sample
from rollout.sampling import SamplingParams

DRAWS = 20_000
# Twelve tokens; 4 and 9 tie, 7 is impossible, 11 is rare.
LOGITS = np.array([1.0, -0.5, 2.2, 0.3, 1.4, -1.0, 0.9, -np.inf, 0.0, 1.4, -0.2, -6.0])
MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
]


def distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The documented filters one after the other, in float64: temperature, min_p, top_k, top_p."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p * weights.max()] = 0
    if params.top_k > 0:
        weights[weights < np.sort(weights)[::-1][min(params.top_k, len(weights)) - 1]] = 0
    order = np.argsort(-weights, kind="stable")
    mass_before = np.cumsum(weights[order]) - weights[order]
    if params.top_p < 1:
        weights[order[mass_before >= params.top_p * weights.sum()]] = 0
    return weights / weights.sum()


def draw(logits: np.ndarray, params: SamplingParams, count: int, forbidden: tuple[int, ...] = ()):
    """`count` draws from one distribution, as that many rows of one batch."""
    rows = torch.from_numpy(logits).float().expand(count, -1)
    numbers = uniforms(np.full(count, stream_key(3, "run/0/0-0/0"), np.uint64), np.arange(count))
    edited = without(rows, [(row, token) for row in range(count) for token in forbidden]) if forbidden else None
    return [out.numpy() for out in sample(rows, SamplingBatch.build([params] * count, numbers), edited)[:3]]


def without(rows: torch.Tensor, forbidden: list[tuple[int, int]]) -> torch.Tensor:
    """A copy of the logits in which these (row, token) pairs cannot be drawn."""
    edited = rows.clone()
    for row, token in forbidden:
        edited[row, token] = -torch.inf
    return edited


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square; rare tokens are pooled so that every cell expects at least five draws."""
    counts = np.bincount(tokens, minlength=len(expected))
    rare = expected * len(tokens) < 5
    cells = [*counts[~rare], counts[rare].sum()], [*expected[~rare], expected[rare].sum()]
    used = np.array(cells[1]) > 0
    observed, share = np.array(cells[0])[used], np.array(cells[1])[used]
    return float(stats.chisquare(observed, share * len(tokens)).pvalue) if used.sum() > 1 else 1.0


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_k": -1},
        {"top_p": 1e-6},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"min_p": 0.5},
        {"min_p": 1.0},
        {"top_k": 5, "top_p": 0.7},
        {"top_k": 6, "min_p": 0.2},
        {"top_p": 0.8, "min_p": 0.2},
        {"temperature": 0.7, "top_k": 7, "top_p": 0.85, "min_p": 0.05},
        {"temperature": 3.0, "top_k": 7, "top_p": 0.5, "min_p": 0.3},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(params):
    params = SamplingParams(**params)
    expected = distribution(LOGITS, params)
    tokens, logprobs, raw_logprobs = draw(LOGITS, params, DRAWS)
    assert set(tokens) <= set(np.flatnonzero(expected)), "a token of probability zero was drawn"
    assert p_value(tokens, expected) > 1e-4
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    np.testing.assert_allclose(raw_logprobs, np.log(distribution(LOGITS, SamplingParams())[tokens]), atol=1e-5)


def test_top_k_keeps_all_tokens_that_tie_with_the_last_one_as_in_vllm():
    tokens, _, _ = draw(LOGITS, SamplingParams(top_k=2), DRAWS)
    assert set(tokens) == {2, 4, 9}


def test_a_wrong_distribution_would_be_noticed():
    """The test above has power: draws at temperature 1 are not those of temperature 1.1."""
    tokens, _, _ = draw(LOGITS, SamplingParams(), DRAWS)
    assert p_value(tokens, distribution(LOGITS, SamplingParams(temperature=1.1))) < 1e-4


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_extreme_uniforms_draw_possible_tokens(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    batch = SamplingBatch.build([SamplingParams()], np.array([uniform], np.float32))
    assert sample(logits, batch)[0].tolist() == [1 if uniform == 0 else 3]


def test_uniforms_map_to_tokens_by_the_cumulative_distribution():
    """Probabilities 1/2, 1/4, 1/4: the boundaries lie at 0.5 and 0.75."""
    numbers = np.array([0.0, 0.49, 0.51, 0.74, 0.76, 0.999], np.float32)
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(6, -1)
    assert sample(logits, SamplingBatch.build([SamplingParams()] * 6, numbers))[0].tolist() == [0, 0, 1, 1, 2, 2]


def test_greedy_takes_the_largest_and_reports_the_raw_logprob():
    tokens, logprobs, raw_logprobs = draw(LOGITS, SamplingParams(temperature=0.0, top_k=2, min_p=0.9), 3)
    assert tokens.tolist() == [2, 2, 2]
    expected = np.log(distribution(LOGITS, SamplingParams())[2])
    np.testing.assert_allclose(logprobs, expected, atol=1e-6)
    assert np.array_equal(logprobs, raw_logprobs)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.4}], ids=str)
def test_forbidden_tokens_are_never_drawn_and_the_others_share_their_mass(params):
    params = SamplingParams(**params)
    allowed = LOGITS.copy()
    allowed[[2, 4]] = -np.inf
    tokens, logprobs, raw_logprobs = draw(LOGITS, params, DRAWS, forbidden=(2, 4))
    expected = distribution(allowed, params)
    assert not {2, 4} & set(tokens)
    assert p_value(tokens, expected) > 1e-4
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    np.testing.assert_allclose(raw_logprobs, np.log(distribution(LOGITS, SamplingParams())[tokens]), atol=1e-5)


def test_forbidding_holds_for_its_own_row_only_and_for_greedy_rows_too():
    rows = torch.from_numpy(LOGITS).float().expand(2, -1)
    batch = SamplingBatch.build([SamplingParams(temperature=0)] * 2, np.zeros(2, np.float32))
    tokens, logprobs, *_ = sample(rows, batch, without(rows, [(0, 2)]))
    assert tokens.tolist() == [4, 2]
    np.testing.assert_allclose(logprobs.numpy(), np.log(distribution(LOGITS, SamplingParams())[[4, 2]]), atol=1e-6)


def test_sampling_leaves_its_input_alone():
    rows = torch.from_numpy(LOGITS).float().repeat(len(MIXED), 1)
    before = rows.clone()
    sample(rows, SamplingBatch.build(MIXED, np.full(len(MIXED), 0.3, np.float32)), without(rows, [(1, 2)]))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("vocab", [7, 160, 5003])
def test_a_row_alone_equals_the_row_in_any_batch_in_every_bit(vocab):
    generator = torch.Generator().manual_seed(vocab)
    params = MIXED * 3
    logits = torch.randn(len(params), vocab, generator=generator) * 3
    numbers = uniforms(np.arange(len(params), dtype=np.uint64), np.arange(len(params)))
    edited = without(logits, [(2, 1), (9, 3)])
    together = sample(logits, SamplingBatch.build(params, numbers), edited)
    for row in range(len(params)):
        alone = sample(
            logits[row : row + 1],
            SamplingBatch.build([params[row]], numbers[row : row + 1]),
            edited[row : row + 1] if row in (2, 9) else None,
        )
        for whole, single in zip(together, alone, strict=True):
            assert torch.equal(whole[row : row + 1], single), params[row]


def test_a_bfloat16_row_is_sampled_in_float32():
    logits = torch.from_numpy(LOGITS).to(torch.bfloat16)[None]
    _, logprobs, raw, *_ = sample(logits, SamplingBatch.build([SamplingParams()], np.array([0.5], np.float32)))
    assert (logprobs.dtype, raw.dtype) == (torch.float32, torch.float32)


# --- random numbers ---------------------------------------------------------------------------------------------


def splitmix64(seed: int, index: int) -> int:
    """Output number `index` of the reference SplitMix64 started at `seed`, in Python integers."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def test_splitmix64_gives_its_published_first_outputs():
    """For seed 1234567: the values of Vigna's reference code, so that the oracle itself is checked."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, index) for index in range(3)] == expected


@pytest.mark.parametrize("key", [0, 1, 1234567, 2**63, 2**64 - 1])
def test_uniforms_are_the_top_24_bits_of_splitmix64(key):
    positions = np.arange(200)
    expected = [(splitmix64(key, position) >> 40) / 2**24 for position in range(200)]
    assert uniforms(np.full(200, key, np.uint64), positions).tolist() == expected


def test_uniforms_lie_in_the_half_open_unit_interval_and_are_uniform():
    numbers = uniforms(np.full(200_000, stream_key(0, "run/0/0-0/0"), np.uint64), np.arange(200_000))
    assert numbers.dtype == np.float32
    assert 0 <= numbers.min() < numbers.max() < 1
    assert stats.kstest(numbers[:50_000].astype(np.float64), "uniform").pvalue > 1e-4


def test_the_stream_of_a_sample_is_named_by_seed_step_prompt_and_j_but_not_by_the_run():
    digest = hashlib.blake2b(b"5/3/key/1", digest_size=8).digest()
    assert stream_key(5, "run/3/key/1") == stream_key(5, "other/3/key/1") == int.from_bytes(digest, "little")


def test_no_two_streams_are_the_same():
    names = [f"run/{step}/{call}-{i}/{j}" for step, call, i, j in product(range(3), range(2), range(20), range(8))]
    assert len({stream_key(seed, name) for seed in (0, 1) for name in names}) == 2 * len(names)


@pytest.mark.parametrize(
    "other",
    ["run/0/0-0/1", "run/0/0-1/0", "run/1/0-0/0", "run/0/1-0/0"],
    ids=["next j", "next prompt", "next step", "next call"],
)
def test_neighbouring_streams_are_independent(other):
    """No correlation, and every pair of deciles is equally likely, also when one stream is shifted by a token."""
    positions = np.arange(DRAWS)
    a, b = (uniforms(np.full(DRAWS, stream_key(0, name), np.uint64), positions) for name in ("run/0/0-0/0", other))
    for shift in (0, 1):
        left, right = a[: DRAWS - shift], b[shift:]
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / np.sqrt(DRAWS)
        table = np.histogram2d(left, right, bins=10, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(table.ravel()).pvalue > 1e-4


def test_the_first_tokens_of_many_samples_are_independent_of_each_other():
    """What a group sees: position 0 of 200 prompts with 100 samples each, tabulated by neighbouring j."""
    keys = np.array([[stream_key(0, f"run/0/0-{i}/{j}") for j in range(100)] for i in range(200)], np.uint64)
    numbers = uniforms(keys, np.zeros(keys.shape, np.int64))
    assert stats.kstest(numbers.ravel().astype(np.float64), "uniform").pvalue > 1e-4
    for left, right in ((numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:])):
        table = np.histogram2d(left.ravel(), right.ravel(), bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chisquare(table.ravel()).pvalue > 1e-4
