"""Every MoE family of the installed transformers: served exactly, as the table says, or refused by name."""

from __future__ import annotations

import collections
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from rollout import RolloutClient, SamplingParams
from rollout.__main__ import main
from rollout.families import FamilyRow, declared_families, family_table, measured_table
from rollout.self_test import TOLERANCE
from storage import Trace
from tests.families import NOT_BUILDABLE, VOCAB, WINDOW, save_tiny
from tests.measure_families import measure
from tests.rollout.oracle import Forward, log_softmax, mostly, routes_agree, rows_of, tokens_agree
from tests.rollout.witness import FamilyOracle

REPRESENTATIVE = ("gpt_oss", "deepseek_v3", "llama4_text", "mixtral", "qwen3_next", "jamba")
ROWS = {row.family: row for row in measured_table().rows}
SERVED = [row.family for row in ROWS.values() if not row.served.startswith("refused")]
FAST = [name for name in SERVED if ROWS[name].served.startswith("fast")]
MAX_TOKENS = 12
LENGTHS = (1, 23, 60, 2, 37, 9, 17, 5)  # windows and chunks are 16
PROMPTS = [np.random.default_rng(i).integers(3, VOCAB, length).tolist() for i, length in enumerate(LENGTHS)]
FAST_ERROR = 1e-4
SLOW_ERROR = 1e-2  # decoding a linear or state-space layer is another algorithm than one forward, in transformers too
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=MAX_TOKENS, seed=3, ignore_eos=True)


def families(names):
    """The whole list; all but the representative ones are left to the full tier."""
    marks = {name: [] if name in REPRESENTATIVE else [pytest.mark.full] for name in names}
    return pytest.mark.parametrize("family", [pytest.param(name, marks=marks[name]) for name in names])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Callable[..., Path]:
    """`tiny("mixtral", sliding_window=4)`: a checkpoint, built once per arguments."""
    return cache(lambda family, **overrides: save_tiny(family, tmp_path_factory.mktemp(family), **overrides))


def check(path: Path, chunk: int, tolerance: float) -> None:
    """Tokens are those of `generate`, routes those that the experts received, logprobs the plain model's.

    The pool holds two of the longest requests, so that most wait for slots; three run at a time.
    """
    oracle = FamilyOracle(path)
    kv_tokens = 2 * (max(LENGTHS) + MAX_TOKENS)
    with RolloutClient.local(path, max_batch_tokens=chunk, kv_tokens=kv_tokens, max_running_requests=3) as client:
        traces = client.sample(PROMPTS, sampling_params=GREEDY)
    agreed = []
    for trace, prompt in zip(traces, PROMPTS, strict=True):
        assert (trace.prompt_ids, trace.finish_reason) == (prompt, "length")
        truth = oracle.forward(trace.token_ids)
        assert len(trace.routed_experts) == rows_of(trace)
        agreed.append(routes_agree(truth, trace.routed_experts))
        if agreed[-1]:
            agreed.append(tokens_agree(oracle, prompt, trace.completion_ids, oracle.greedy(prompt, MAX_TOKENS)))
            assert logprob_error(trace, truth) < tolerance
    assert mostly(agreed)


def logprob_error(trace: Trace, truth: Forward) -> float:
    """The largest difference to the logprobs of one forward."""
    rows = truth.logits[len(trace.prompt_ids) - 1 : -1]
    expected = [log_softmax(row)[token] for row, token in zip(rows, trace.completion_ids, strict=True)]
    return float(abs(trace.raw_logprobs - expected).max())


@families(SERVED)
@pytest.mark.parametrize("chunk", [1, 7, 2048])
def test_greedy_tokens_and_routes(family, chunk, tiny):
    exact = ROWS[family].served in ("fast: slot pool", "fast: latent")
    check(tiny(family), chunk, FAST_ERROR if exact else SLOW_ERROR)


@pytest.mark.parametrize("chunk", [7, 2048])
def test_a_window_that_only_the_mask_knows(chunk, tiny):
    """phimoe builds its window into the mask and does not pass it to attention: refused by the pool, served slowly."""
    path = tiny("phimoe", sliding_window=WINDOW)
    assert measure("phimoe", path).served == "slow: own cache"
    check(path, chunk, SLOW_ERROR)


@families(FAST)
def test_batch_invariance(family, tiny):
    """Alone and whole, or together in chunks of 7 and in other slots: the same in every bit."""
    keys = [f"p{index}" for index in range(len(PROMPTS))]
    with RolloutClient.local(tiny(family), batch_invariant=True, max_batch_tokens=7) as client:
        together = client.sample(PROMPTS, sampling_params=SAMPLED, prompt_keys=keys, step=0)
    with RolloutClient.local(tiny(family), batch_invariant=True) as client:
        for prompt, key, trace in zip(PROMPTS, keys, together, strict=True):
            alone = client.sample([prompt], sampling_params=SAMPLED, prompt_keys=[key], step=0)[0]
            assert alone.completion_ids == trace.completion_ids
            assert alone.logprobs.tobytes() == trace.logprobs.tobytes()
            assert np.array_equal(alone.routed_experts, trace.routed_experts)


@families(SERVED)
def test_the_tiny_models_look_back(family, tiny):
    """Otherwise a wrong window or state would change nothing: the last logits depend on the tokens before."""
    oracle = FamilyOracle(tiny(family))
    prompt = PROMPTS[4]
    last = oracle.forward(prompt).logits[-1]
    changed = oracle.forward([*prompt[:-4], *PROMPTS[2][:3], prompt[-1]]).logits[-1]
    assert abs(last - changed).mean() > 0.03 * last.std()


@pytest.mark.full
@pytest.mark.parametrize("family", [row.family for row in ROWS.values()])
def test_the_table_is_what_happens(family, tiny):
    assert measure(family, tiny(family)) == ROWS[family]


@pytest.mark.full
def test_no_family_is_left_out(capsys):
    """Each family that transformers declares is in the table or has a reason why it cannot be built small."""
    assert set(declared_families()) == ROWS.keys() | NOT_BUILDABLE.keys()
    assert not ROWS.keys() & NOT_BUILDABLE.keys()
    counts = collections.Counter(row.served.partition(":")[0] for row in ROWS.values())
    with capsys.disabled():
        print(f"\n{len(ROWS)} families: {dict(counts)}, {len(NOT_BUILDABLE)} not buildable")
    assert counts["fast"] >= 51
    assert counts["refused"] == 1


def test_what_is_refused_is_refused_by_name(tiny):
    """doge mixes the scores of different tokens before it selects: a token's experts depend on the tokens behind it."""
    with pytest.raises(ValueError, match=r"DogeForCausalLM computed .* differs from the plain model"):
        RolloutClient.local(tiny("doge"))


def test_a_row_says_how_a_family_is_served():
    assert ROWS["mixtral"] == FamilyRow("mixtral", "fast: slot pool", captured=True, replayed=True)
    assert ROWS["deepseek_v3"].served == "fast: latent"
    assert ROWS["jamba"].served == "fast: states"
    assert ROWS["zaya"].served == "slow: own cache"


def test_the_command_prints_a_row_per_family(capsys):
    assert main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "│" in line and line.split()[1] in ROWS] == sorted(ROWS)


def test_with_another_version_what_was_not_measured_is_said(monkeypatch):
    """As if the installed transformers were newer, and knew one family more and one less."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.0.0")
    monkeypatch.setattr("rollout.families.declared_families", lambda: ["mixtral", "newest_moe"])
    table = family_table()
    assert "measured with transformers 5" in str(table.title)
    assert "installed is 9.0.0" in str(table.title)
    assert [list(column.cells) for column in table.columns[:2]] == [
        ["mixtral", "newest_moe"],
        ["fast: slot pool", "not measured: tried, and tested, when it is loaded"],
    ]


def test_a_family_that_decodes_otherwise_than_it_computes_prompts_is_served_with_a_word(tiny, caplog, monkeypatch):
    """nemotron_h clamps its time steps in prompts and not in decoding: transformers' own decode differs as much, here
    by more than 1e-6 and on long prompts by more than the usual tolerance."""
    monkeypatch.setitem(TOLERANCE, torch.float32, 1e-6)
    path = tiny("nemotron_h", time_step_min=0.001)
    with caplog.at_level("WARNING", logger="rollout.self_test"):
        check(path, 2048, SLOW_ERROR)
    assert "decode with another algorithm" in caplog.text


def test_a_failed_step_of_the_slow_path_ends_its_own_requests_only(tiny):
    """The next step was launched before: its decodes of the ended requests have no cache, its other requests go on."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with RolloutClient.local(tiny("zaya"), max_batch_tokens=16, max_running_requests=4, kv_tokens=2000) as client:
        expected = client.sample([[5] * 20], sampling_params=params)[0].completion_ids
        runner = client.backend._built.runner
        forward, calls = runner.logits, []

        def failing(batch):
            calls.append(None)
            if len(calls) == 2:
                raise MemoryError("transient")
            return forward(batch)

        runner.logits = failing
        traces = client.sample([[5] * 20] * 30, sampling_params=params)
        runner.stream.run(lambda: None)  # what ended requests leave is dropped on the device's thread
        assert runner.own_caches._caches == {}
    failed = [trace for trace in traces if trace.finish_reason == "error"]
    assert {trace.error for trace in failed} == {"MemoryError: transient"}
    assert 1 <= len(failed) <= 4
    assert {tuple(t.completion_ids) for t in traces if t.finish_reason != "error"} == {tuple(expected)}


def test_the_self_test_leaves_no_state_behind(tiny):
    with RolloutClient.local(tiny("jamba"), batch_invariant=True) as client:
        assert client.backend._built.runner.states._states == {}
