"""Penalties, bias, allowed ids and bad words: each completion token against a reference in plain Python.

The reference knows the whole sequence; the engine's device has the last token only, and the host all but that one.
"""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from rollout.backend import SampleRequest
from rollout.penalties import TokenCounts
from rollout.processors import LogitEdits
from rollout.request import Request
from rollout.sampler import SamplingBatch, sample
from rollout.stops import StopChecker
from storage import Trace
from tests.rollout.oracle import Oracle, log_softmax
from tests.rollout.probes import parts_of
from tests.rollout.test_engine_draws import BOUNDARY, reference_uniform

torch = pytest.importorskip("torch")

PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
EXTRAS = [
    {"repetition_penalty": 3.0},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -2.0},
    PENALTIES,
    {"logit_bias": {3: 4.0, 7: -100.0}},
    {"allowed_token_ids": (2, 3, 5, 8, 13)},
    {"bad_words": ((4,), (3, 5), (5, 3), (3, 3, 3), (5, 5)), "allowed_token_ids": (3, 4, 5, 9)},
    {**PENALTIES, "logit_bias": {3: 4.0}, "allowed_token_ids": (3, 5, 9), "bad_words": ((3, 3),), "top_p": 0.9},
]


def edited(logits: np.ndarray, prompt: list[int], done: list[int], params: SamplingParams) -> np.ndarray:
    """The documented changes one after the other, in float64."""
    out = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        out[[token for token in range(len(out)) if token not in params.allowed_token_ids]] = -np.inf
    for word in params.bad_words:
        if list(word[:-1]) == done[len(done) - len(word) + 1 :]:
            out[word[-1]] = -np.inf
    for token, bias in params.logit_bias.items():
        out[token] += bias
    for token in {*prompt, *done}:
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in set(done):
        out[token] -= done.count(token) * params.frequency_penalty + params.presence_penalty
    return out


def check(oracle: Oracle, trace: Trace) -> int:
    """Every token and both logprobs of a trace; how many draws were compared."""
    params = SamplingParams(**trace.sampling_params)
    rows = oracle.forward(trace.token_ids).logits[len(trace.prompt_ids) - 1 :]
    compared = 0
    for at, token in enumerate(trace.completion_ids):
        assert abs(trace.raw_logprobs[at] - log_softmax(rows[at])[token]) < 1e-5
        logits = edited(rows[at], trace.prompt_ids, trace.completion_ids[:at], params)
        if params.temperature == 0:
            best = np.sort(logits)[-2:]
            assert token == logits.argmax() or best[1] - best[0] < 1e-5
            assert trace.logprobs[at] == trace.raw_logprobs[at]
            continue
        expected = log_softmax(logits / params.temperature)
        if params.top_p < 1:
            order = np.argsort(-expected, kind="stable")
            mass_before = np.cumsum(np.exp(expected[order])) - np.exp(expected[order])
            expected[order[mass_before >= params.top_p]] = -np.inf
            expected = log_softmax(expected)
        assert abs(trace.logprobs[at] - expected[token]) < 2e-5
        edges = np.cumsum(np.exp(expected))
        u = reference_uniform(trace.seed, trace.sample_id.partition("/")[2], at)
        if np.abs(edges - u).min() > BOUNDARY:
            assert token == int(np.searchsorted(edges, u, side="right"))
            compared += 1
    return compared


PROMPTS = [[5, 9, 11], [7], [20, 3, 44, 60, 13, 8]]


@pytest.fixture(scope="module")
def oracle(checkpoint) -> Oracle:
    return Oracle(checkpoint("qwen3_moe"))


@pytest.fixture(scope="module", params=[{}, {"disable_overlap_schedule": True}], ids=["overlap", "no overlap"])
def client(request, checkpoint):
    # Few rows and a small budget: rows change owners, and some rows skip steps.
    options = {"max_running_requests": 3, "max_batch_tokens": 5, "dtype": "float32"}
    with RolloutClient.local(checkpoint("qwen3_moe"), **options, **request.param) as client:
        yield client


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_draw_is_the_references(client, oracle, temperature) -> None:
    """All variants in one batch, with plain neighbours, so that a row that got another's change would show."""
    variants = [
        SamplingParams(temperature=temperature, max_tokens=14, ignore_eos=True, seed=3, **e) for e in [*EXTRAS, {}]
    ]
    prompts = [prompt for prompt in PROMPTS for _ in variants]
    traces = client.sample(prompts, sampling_params=variants * len(PROMPTS), step=1)
    compared = sum(check(oracle, trace) for trace in traces)
    assert compared >= (0.95 * 14 * len(traces) if temperature else 0)


def test_bad_words_never_appear_and_are_otherwise_free(client) -> None:
    words = ((3, 5), (5, 3), (3, 3, 3))
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1, bad_words=words, allowed_token_ids=(3, 5))
    found = [tuple(t.completion_ids) for t in client.sample([[7]], num_samples=8, sampling_params=params)]
    texts = ["".join(map(chr, tokens)) for tokens in found]
    assert not any("".join(map(chr, word)) in text for word in words for text in texts)
    assert any(tokens[:2] == (3, 3) for tokens in found) or all(tokens[0] == 5 for tokens in found)


def test_a_request_that_may_draw_nothing_ends_alone_with_the_reason(client) -> None:
    nothing = [
        SamplingParams(
            temperature=t,
            max_tokens=6,
            seed=0,
            ignore_eos=True,
            allowed_token_ids=(4, 5),
            bad_words=((4, 4), (4, 5), (5,)),
        )
        for t in (0.0, 1.0)
    ]
    plain = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
    traces = client.sample([[7]] * 3, sampling_params=[nothing[0], plain, nothing[1]])
    assert [trace.finish_reason for trace in traces] == ["error", "length", "error"]
    assert [trace.completion_ids for trace in (traces[0], traces[2])] == [[4], [4]]
    assert "bad_words, logit_bias and min_tokens together leave no completion token 1 to draw" in traces[0].error


@pytest.mark.parametrize("extra", EXTRAS, ids=str)
def test_identical_in_any_batch_with_and_without_overlap(checkpoint, extra) -> None:
    params = SamplingParams(max_tokens=10, ignore_eos=True, seed=3, **extra)
    found = []
    for options in ({}, {"disable_overlap_schedule": True, "max_running_requests": 2, "max_batch_tokens": 4}):
        with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", batch_invariant=True, **options) as client:
            found.append(client.sample(PROMPTS, num_samples=2, sampling_params=params))
    for one, other in zip(*found, strict=True):
        assert (one.completion_ids, one.routed_experts.tobytes()) == (
            other.completion_ids,
            other.routed_experts.tobytes(),
        )
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


@pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "no overlap"])
def test_a_request_that_yielded_goes_on_as_if_it_had_not(checkpoint, overlap_off) -> None:
    """What was counted, and the optional logprobs, survive that another request took the row meanwhile."""
    extras = [PENALTIES | {"logprobs": 2}, {"bad_words": ((3, 5), (5, 3), (3, 3)), "allowed_token_ids": (3, 5, 7)}]
    params = [SamplingParams(max_tokens=30, ignore_eos=True, seed=3, **e) for e in [*extras, {"prompt_logprobs": 1}]]
    found = []
    for tight in ({}, {"kv_tokens": 90, "max_running_requests": 3}):
        options = {"batch_invariant": True, "disable_overlap_schedule": overlap_off, **tight}
        with RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", **options) as client:
            found.append(client.sample([list(range(20, 40))] * 6, sampling_params=params * 2))
            preemptions = parts_of(client)[1].preemptions
    assert preemptions > 0
    assert found[0] == found[1]


# --- counts on the device -----------------------------------------------------------------------------------------


def request(prompt: tuple[int, ...], row: int = 0, outputs: list[int] | None = None, **params) -> Request:
    asked = SampleRequest("run/0/0-0/0", 0, prompt, SamplingParams(seed=0, **params))
    stop = StopChecker(asked.sampling_params, (), None)
    return Request(asked, stop, random_key=0, routes=None, row=row, output_ids=outputs or [])


def penalised(counts: TokenCounts, entry: Request, drawn: int, vocab: int = 8) -> list[float]:
    logits = torch.ones(1, vocab)
    plan = counts.plan([(0, entry, drawn)])
    counts.penalise(logits, plan)
    counts.add(plan, torch.tensor([2]))
    return logits[0].tolist()


def test_counts_follow_tokens_that_the_host_has_not_seen() -> None:
    counts, entry = TokenCounts(1), request((5, 7), frequency_penalty=0.25)
    assert penalised(counts, entry, 0) == [1] * 8
    assert penalised(counts, entry, 1) == [1, 1, 0.75, 1, 1, 1, 1, 1]
    assert penalised(counts, entry, 2) == [1, 1, 0.5, 1, 1, 1, 1, 1]


def test_a_continued_sequence_is_counted_from_its_token_ids() -> None:
    counts = TokenCounts(1)
    entry = request((5,), outputs=[2, 3, 2], frequency_penalty=0.25, repetition_penalty=2.0)
    assert penalised(counts, entry, 3) == [1, 1, 0, 0.25, 1, 0.5, 1, 1]


def test_a_row_that_went_to_another_request_or_was_taken_back_starts_anew() -> None:
    counts, first = TokenCounts(1), request((5,), presence_penalty=0.5)
    penalised(counts, first, 0)
    assert penalised(counts, request((6,), presence_penalty=0.5), 0) == [1] * 8
    assert penalised(counts, first, 0) == [1] * 8


def test_a_sequence_cannot_go_on_from_tokens_nobody_knows() -> None:
    with pytest.raises(RuntimeError, match="3 tokens were drawn and 0 are known"):
        TokenCounts(1).plan([(0, request((5,), presence_penalty=0.5), 3)])


def test_no_memory_is_taken_while_nobody_uses_penalties() -> None:
    counts = TokenCounts(4)
    edits = LogitEdits.plan([(0, request((5,), logit_bias={3: 1.0}), 0)], counts)
    assert edits.apply(torch.zeros(1, 8), torch.zeros(4, dtype=torch.int64), counts)[0, 3] == 1
    assert counts._completion.numel() == counts._in_prompt.numel() == 0
    assert LogitEdits.plan([(0, request((5,), temperature=0.5), 0)], counts) is None


def test_the_worked_example_of_vllms_formula() -> None:
    """Logits 2 and -2, seen in the prompt, repetition 2: 1 and -4; the completion's token: minus 0.5 * 2 minus 1."""
    entry = request((0, 1), outputs=[2, 2], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0)
    counts, logits = TokenCounts(1), torch.tensor([[2.0, -2.0, 6.0, 4.0]])
    counts.penalise(logits, counts.plan([(0, entry, 2)]))
    assert logits[0].tolist() == [1.0, -4.0, 1.0, 4.0]


def test_a_greedy_row_reports_the_raw_logprob_of_the_token_it_was_moved_to() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]])
    batch = SamplingBatch.build([SamplingParams(temperature=0)], np.zeros(1, np.float32))
    tokens, logprobs, raw, *_ = sample(logits, batch, torch.tensor([[3.0, 9.0, 0.0]]))
    assert tokens.tolist() == [1]
    assert logprobs.item() == raw.item() == pytest.approx(1 - np.log(np.exp([3, 1, 0]).sum()), abs=1e-6)
