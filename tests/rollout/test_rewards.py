"""Rewards: plain and async functions, and nothing committed when one fails."""

import asyncio
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from rollout.rewards import RewardRunner
from rollout.tiny_moe import MODEL_PATH
from storage import Trace, TraceDataset
from tests.rollout.threads import no_thread_left, threads

PARAMS = SamplingParams(max_tokens=4, seed=0)
PROMPTS = ["1+2=", "12+34="]


def trace(name: str = "a", text: str = "46") -> Trace:
    return Trace(f"run/0/{name}/0", 0, [1], [2], [-0.5], np.zeros((1, 1, 1), np.uint8), "stop", text=text)


@pytest.fixture
def runner():
    made = []

    def make(function):
        made.append(RewardRunner(function))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Meeting:
    """A reward that is there once `count` calls run side by side."""

    def __init__(self, count: int) -> None:
        self._barrier = asyncio.Barrier(count)

    async def __call__(self, trace: Trace) -> float:
        async with asyncio.timeout(60), self._barrier:
            return float(len(trace.text))


class Judge:
    async def __call__(self, trace: Trace) -> float:
        return 0.25


def test_a_plain_function_is_called_at_once_in_the_callers_thread(runner):
    seen = []
    future = runner(lambda trace: seen.append(threading.current_thread()) or len(trace.text)).start(trace())
    assert seen == [threading.current_thread()]
    assert future.done()
    assert future.result() == 2.0
    assert isinstance(future.result(), float)


def test_coroutines_run_side_by_side(runner):
    scores = runner(Meeting(40))
    futures = [scores.start(trace(str(i), "x" * i)) for i in range(40)]
    assert not futures[-1].done()
    assert [future.result() for future in futures] == list(range(40))


def test_an_object_with_an_async_call_works(runner):
    assert runner(Judge()).start(trace()).result(timeout=60) == 0.25


@pytest.mark.parametrize(("value", "reward"), [(True, 1.0), (3, 3.0), (np.float32(0.5), 0.5)])
def test_what_float_accepts_is_a_reward(runner, value, reward):
    assert runner(lambda _: value).start(trace()).result() == reward


@pytest.mark.parametrize("value", [None, "good", [1.0], {}], ids=repr)
def test_anything_else_is_refused_naming_value_and_sample(runner, value):
    with pytest.raises(TypeError, match=r"reward_fn returned .* for run/0/a/0, need a float") as caught:
        runner(lambda _: value).start(trace()).result()
    assert repr(value) in str(caught.value)


def fail(_: Trace) -> float:
    raise LookupError("no such answer")


async def fail_later(_: Trace) -> float:
    await asyncio.sleep(0)
    raise LookupError("no such answer")


@pytest.mark.parametrize("function", [fail, fail_later])
def test_an_error_of_the_function_is_raised_with_a_note_that_names_the_sample(runner, function):
    with pytest.raises(LookupError, match="no such answer") as caught:
        runner(function).start(trace()).result(timeout=60)
    assert caught.value.__notes__ == ["raised by reward_fn for run/0/a/0; nothing of this step was committed"]


def test_close_stops_the_thread_of_the_event_loop():
    before = threads()
    with no_thread_left():
        scores = RewardRunner(Meeting(1))
        scores.start(trace()).result(timeout=60)
        (started,) = threads() - before
        scores.close()
        assert not started.is_alive()
        scores.close()


def test_close_cancels_rewards_still_to_come():
    async def never(_: Trace) -> float:
        await asyncio.sleep(3600)
        return 1.0

    scores = RewardRunner(never)
    future = scores.start(trace())
    scores.close()
    with pytest.raises(CancelledError):
        future.result(timeout=60)


def test_a_reward_asked_for_while_others_are_cancelled_is_refused_instead_of_never_known():
    asleep, cancelling, refused = threading.Event(), threading.Event(), threading.Event()

    async def cancelled_slowly(_: Trace) -> float:
        try:
            asleep.set()
            await asyncio.sleep(3600)
        finally:
            cancelling.set()
            await asyncio.to_thread(refused.wait, 60)
        return 1.0

    scores = RewardRunner(cancelled_slowly)
    scores.start(trace())
    closing = threading.Thread(target=scores.close)
    assert asleep.wait(60)
    closing.start()
    assert cancelling.wait(60)
    with pytest.raises(RuntimeError, match="closed before the reward of run/0/b/0"):
        scores.start(trace("b"))
    refused.set()
    closing.join(60)
    assert not closing.is_alive()


# --- through the client -----------------------------------------------------------------------------------------


def correct(trace: Trace) -> float:
    return float(trace.text == trace.metadata["answer"])


async def correct_later(trace: Trace) -> float:
    await asyncio.sleep(0.001)
    return correct(trace)


@pytest.mark.parametrize("function", [correct, correct_later])
def test_rewards_reach_the_traces_and_the_dataset(tmp_path, function):
    with RolloutClient.local(MODEL_PATH, traces=tmp_path / "t", reward_fn=function) as client:
        facts = [{"answer": "3"}, {"answer": "46"}]
        traces = client.sample(PROMPTS, num_samples=12, sampling_params=PARAMS, metadata=facts)
    expected = {t.sample_id: float(t.text == t.metadata["answer"]) for t in traces}
    assert {t.sample_id: t.reward for t in traces} == expected
    assert 0 < sum(expected.values()) < 24, "some right and some wrong, or the test says nothing"
    dataset = TraceDataset(tmp_path / "t")
    assert {t.sample_id: t.reward for t in dataset} == expected


@pytest.mark.parametrize("function", [correct, correct_later])
def test_rewards_are_known_before_a_trace_is_streamed(function):
    with RolloutClient.local(MODEL_PATH, reward_fn=function) as client:
        arguments = {"num_samples": 3, "sampling_params": PARAMS, "metadata": {"answer": "3"}}
        assert all(t.reward in (0.0, 1.0) for t in client.stream(PROMPTS, **arguments))


@pytest.mark.parametrize("later", [False, True])
def test_a_reward_that_fails_commits_nothing_and_the_step_can_be_sampled_again(tmp_path, later):
    broken = {"run/0/0-1/2"}

    def reward(trace: Trace) -> float:
        if trace.sample_id in broken:
            raise LookupError("no such answer")
        return 1.0

    async def reward_later(trace: Trace) -> float:
        await asyncio.sleep(0.001)
        return reward(trace)

    function = reward_later if later else reward
    with RolloutClient.local(MODEL_PATH, traces=tmp_path / "t", reward_fn=function) as client:
        with pytest.raises(LookupError) as caught:
            client.sample(PROMPTS, num_samples=4, sampling_params=PARAMS)
        assert "run/0/0-1/2" in caught.value.__notes__[0]
        assert TraceDataset(tmp_path / "t").steps == []
        broken.clear()
        traces = client.sample(PROMPTS, num_samples=4, sampling_params=PARAMS)
    dataset = TraceDataset(tmp_path / "t")
    assert (dataset.steps, len(dataset), dataset.verify()) == ([0], 8, [])
    assert {t.sample_id for t in dataset} == {t.sample_id for t in traces}


def sample_twice(client):
    for _ in range(2):
        client.sample(PROMPTS, sampling_params=PARAMS)


def test_a_reward_that_fails_inside_a_step_leaves_the_whole_step_out(tmp_path):
    def reward(trace: Trace) -> float:
        return 1.0 if "0-" in trace.sample_id else fail(trace)

    with RolloutClient.local(MODEL_PATH, traces=tmp_path / "t", reward_fn=reward) as client:
        with pytest.raises(LookupError), client.step(3):
            sample_twice(client)
        client.sample(PROMPTS, sampling_params=PARAMS)
    assert TraceDataset(tmp_path / "t").steps == [0]


def test_references_and_rewards_exclude_each_other():
    with RolloutClient.local(MODEL_PATH, reward_fn=correct) as client:
        with pytest.raises(
            ValueError, match="as_refs=True leaves the traces in the object store, reward_fn needs them"
        ):
            client.stream(PROMPTS, sampling_params=PARAMS, as_refs=True)
        assert client.sample(PROMPTS, sampling_params=PARAMS, metadata={"answer": "3"})[0].sample_id == "run/0/0-0/0"
