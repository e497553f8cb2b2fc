"""Abort, pause, sleep and weight updates of real groups of ranks, also when a rank dies over one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from storage.trace import Trace
from tests.families import save_tiny

pytestmark = pytest.mark.timeout(600)
PROMPTS = [[5, 9, 77, 31], [8, 100], [3, 4] * 10, [7, 8, 9], [11] * 9, [64], [90, 2, 2, 17, 80], [1, 2]]
LONG = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
OPTIONS = {"dtype": "float32", "max_running_requests": 3, "collective_timeout_s": 15}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("control") / "qwen3_moe")


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights, as a checkpoint."""
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    path = tmp_path_factory.mktemp("control") / "other"
    changed.save_pretrained(path)
    return path


def sampled(path: Path) -> list[Trace]:
    with RolloutClient.local(path, **OPTIONS) as client:
        return client.sample(PROMPTS, sampling_params=LONG, step=0)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Trace]:
    """What one engine samples."""
    return sampled(model)


@pytest.fixture(scope="module")
def expected_of_other(other: Path) -> list[Trace]:
    return sampled(other)


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[RolloutClient]:
    """Two ranks; tests leave them with their first weights, awake."""
    with RolloutClient.local(model, dp_size=2, **OPTIONS) as client:
        yield client


def check_same(found: list[Trace], expected: list[Trace]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.completion_ids, one.finish_reason) == (other.completion_ids, other.finish_reason)
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-5)


class Call(threading.Thread):
    """One `client.sample` of all prompts in the background, which has begun when this returns."""

    def __init__(self, client: RolloutClient, begun: bool = True) -> None:
        super().__init__(daemon=True)
        self._client = client
        before = tokens(client)
        self.start()
        while begun and tokens(client) < before + 40:
            time.sleep(0.01)

    def run(self) -> None:
        self._traces = self._client.sample(PROMPTS, sampling_params=LONG, step=0)

    def traces(self) -> list[Trace]:
        self.join(120)
        assert not self.is_alive()
        return self._traces


def tokens(client: RolloutClient) -> int:
    return sum(rank["sampled_tokens"] for rank in client.backend.rank_stats())  # type: ignore[attr-defined]


def check_aborted(found: list[Trace], expected: list[Trace]) -> None:
    """Each has the first tokens of what one engine samples, and a row for all but the last."""
    for one, whole in zip(found, expected, strict=True):
        assert one.finish_reason == "abort"
        assert one.completion_ids == whole.completion_ids[: len(one.completion_ids)]
        if one.completion_ids:
            rows = len(one.prompt_ids) + len(one.completion_ids) - 1
            np.testing.assert_array_equal(one.routed_experts, whole.routed_experts[:rows])


@pytest.mark.full
def test_aborted_samples_keep_what_they_have_and_can_be_continued(pair, expected):
    call = Call(pair)
    pair.abort(["run/0/0-1/0", "run/0/0-7/0"])
    found = call.traces()
    check_aborted([found[1], found[7]], [expected[1], expected[7]])
    check_same([found[i] for i in (0, 2, 3, 4, 5, 6)], [expected[i] for i in (0, 2, 3, 4, 5, 6)])
    check_same(pair.sample(resume=[found[1], found[7]], sampling_params=LONG), [expected[1], expected[7]])


@pytest.mark.full
def test_ending_all_samples_leaves_the_group_ready(pair, expected):
    call = Call(pair)
    pair.abort("all")
    check_aborted(call.traces(), expected)
    check_same(pair.sample(PROMPTS, sampling_params=LONG, step=0), expected)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["keep", "wait", "yield", "abort"])
def test_while_the_group_is_paused_no_rank_makes_a_token(pair, expected, mode):
    call = Call(pair)
    pair.pause(mode)
    before = tokens(pair)
    time.sleep(0.3)
    assert tokens(pair) == before
    pair.resume()
    found = call.traces()
    if mode == "abort":
        check_aborted(found, expected)
    else:
        check_same(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_sleep_and_wake(pair, model, expected, level, in_flight):
    call = Call(pair)
    pair.sleep(level, in_flight=in_flight)
    with pytest.raises(RuntimeError, match="the ranks sleep"):
        pair.sample([[1]], sampling_params=LONG)
    if level == 2:
        with pytest.raises(ValueError, match=r"kept no weights: call wake\(weights, version\)"):
            pair.wake()
    pair.wake(*((model, 1) if level == 2 else ()), force=True)
    found = call.traces()
    if in_flight == "wait":
        check_same(found, expected)
    check_same(pair.sample(PROMPTS, sampling_params=LONG, step=0), expected)
    with pytest.raises(RuntimeError, match=r"wake\(\) of ranks that do not sleep"):
        pair.wake()


@pytest.mark.full
def test_weights_that_one_rank_alone_refuses_leave_the_group_fit_for_the_next(model, other, expected_of_other):
    good = AutoModelForCausalLM.from_pretrained(other).state_dict()
    name = next(name for name in good if ".experts." in name)
    bad = good | {name: good[name].clone()}
    bad[name][-1] = torch.nan  # of an expert of the last rank
    with RolloutClient.local(model, dp_size=2, **OPTIONS) as client:
        with pytest.raises(ValueError, match="not finite"):
            client.update_weights(bad, 1, check_finite=True)
        client.update_weights(good, 1, check_finite=True)
        client.sleep(level=2)
        with pytest.raises(ValueError, match="not finite"):
            client.wake(bad, 2, check_finite=True)
        client.wake(good, 2, check_finite=True)
        check_same(client.sample(PROMPTS, sampling_params=LONG, step=0), expected_of_other)


@pytest.mark.full
def test_a_pause_between_the_check_and_the_second_half_of_an_update_delays_it(model, other, expected_of_other):
    """One rank has requests then and the other has none."""
    with RolloutClient.local(model, dp_size=2, **OPTIONS) as client:
        ranks, weights = client.backend.ranks, AutoModelForCausalLM.from_pretrained(other).state_dict()
        ask: Callable = ranks.ask

        def ask_late(name: str, *args: object, **kwargs: object) -> list:
            if name == "apply":
                ranks.ask = ask
                client.pause()
            return ask(name, *args, **kwargs)

        call = threading.Thread(target=client.sample, args=(PROMPTS[:1],), kwargs={"sampling_params": LONG})
        call.start()
        while tokens(client) < 10:
            time.sleep(0.01)
        ranks.ask = ask_late
        update = threading.Thread(target=client.update_weights, args=(weights, 1))
        update.start()
        while not client.backend._life.wanted.paused or ranks.ask is ask_late:
            time.sleep(0.01)
        time.sleep(0.3)
        client.resume()
        update.join(60)
        assert not update.is_alive()
        call.join(60)
        check_same(client.sample(PROMPTS, sampling_params=LONG, step=0), expected_of_other)


def strike(client: RolloutClient, command: str, how: signal.Signals) -> None:
    """Rank 1 dies, or stands still, when the group's present ranks are asked for `command`."""
    ranks = client.backend.ranks  # type: ignore[attr-defined]
    ask: Callable = ranks.ask

    def ask_dying(name: str, *args: object, **kwargs: object) -> list:
        if name == command:
            os.kill(ranks.links[1].process.pid, how)
        return ask(name, *args, **kwargs)

    ranks.ask = ask_dying


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "command", "busy"),
    [
        (signal.SIGKILL, "stage", True),
        (signal.SIGKILL, "apply", True),
        (signal.SIGKILL, "apply", False),
        (signal.SIGKILL, "drop", False),
        (signal.SIGSTOP, "stage", False),
        (signal.SIGSTOP, "apply", True),
    ],
)
def test_a_rank_that_dies_over_an_update_leaves_no_rank_with_the_old_weights(
    model, other, expected_of_other, how, command, busy
):
    with RolloutClient.local(model, dp_size=2, **OPTIONS) as client:
        call = Call(client) if busy else None
        strike(client, command, how)
        begun = time.monotonic()
        client.update_weights(AutoModelForCausalLM.from_pretrained(other).state_dict(), 1, in_flight="keep")
        assert time.monotonic() - begun < 15 + 90  # the timeout, and a start on a busy machine
        check_same(client.sample(PROMPTS, sampling_params=LONG, step=0), expected_of_other)
        if call is not None:
            versions = [{span.version for span in trace.weight_versions} for trace in call.traces()]
            assert all(spans <= {0, 1} for spans in versions)
        (trace,) = client.sample(PROMPTS[:1], sampling_params=LONG)
        assert [span.version for span in trace.weight_versions] == [1]
