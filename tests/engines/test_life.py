"""An engine of our own that dies is started again, with the weights that it had, or says that it lost them."""

from __future__ import annotations

import asyncio
import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rollout import SamplingParams
from rollout.backend import SampleRequest
from rollout.engine_model import describe_model
from rollout.engine_reply import EngineDeadError
from rollout.engine_thread import EngineThread
from rollout.served_engine import ServedBackend
from rollout.update_modes import Unchanging
from tests.engines.fake_adapter import OwnedEngine
from tests.engines.fakes import Drawn

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


@pytest.fixture
def engine(model: Path) -> OwnedEngine:
    return OwnedEngine(describe_model(str(model)))


@pytest.fixture
def backend(engine: OwnedEngine) -> Iterator[ServedBackend]:
    backend = ServedBackend(engine)
    yield backend
    backend.close()


@pytest.fixture
def newer(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "newer"))


def sample(backend: ServedBackend, count: int = 2, key: object = "") -> list:
    requests = [SampleRequest(f"run/0/{key}{i}/0", 0, (5, i), PARAMS) for i in range(count)]
    return [finished.trace for finished in backend.stream(requests)]


def request_while_it_is_started(backend: ServedBackend, engine: OwnedEngine) -> queue.SimpleQueue:
    """Where the answer will be; the start, for which it waits, is under way."""
    outbox: queue.SimpleQueue = queue.SimpleQueue()
    engine.opening.clear()
    backend.start(SampleRequest("run/0/b/0", 0, (5, 7), PARAMS), outbox)
    engine.opening.wait(20)
    return outbox


def assert_drawn(traces: list, weights: str, version: int) -> None:
    assert traces
    for trace in traces:
        assert trace.error is None
        assert trace.completion_ids == Drawn(trace.prompt_ids, 4, 3, weights, OwnedEngine.shape).ids
        assert trace.weight_version == version


def test_a_crash_fails_what_was_under_way_and_whoever_asks_next_starts_it_once(backend, engine):
    engine.dead = True
    first = sample(backend, 1)
    assert [trace.finish_reason for trace in first] == ["error"]
    assert first[0].error == "trace 'run/0/0/0': its thread has ended"
    assert_drawn(sample(backend, 8), "start", 0)
    assert engine.starts == 2


def test_requests_that_come_together_wait_for_one_start(backend, engine):
    engine.dead = True
    sample(backend, 1)
    results: list = []
    threads = [threading.Thread(target=lambda k=k: results.extend(sample(backend, key=k))) for k in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_drawn(results, "start", 0)
    assert len(results) == 8
    assert engine.starts == 2


def test_an_update_that_comes_while_it_is_started_changes_no_weights_under_a_request(backend, engine, newer):
    engine.dead = True
    sample(backend, 1)
    outbox: queue.SimpleQueue = queue.SimpleQueue()
    engine.start_seconds = 0.2
    with backend.prepare_update(newer, 1) as apply:
        for index in range(8):
            backend.start(SampleRequest(f"run/0/b{index}/0", 0, (5, index), PARAMS), outbox)
        apply("wait", "keep")
    assert_drawn([outbox.get(timeout=60) for _ in range(8)], str(newer), 1)
    assert engine.starts == 2


def test_its_progress_is_the_engines_own_and_none_is_expected_while_it_is_started(backend, engine):
    sample(backend, 3)
    assert backend.progress == 3
    engine.dead, engine.start_seconds = True, 0.2
    sample(backend, 1)
    outbox = request_while_it_is_started(backend, engine)
    assert backend.progress is None
    outbox.get(timeout=60)
    assert backend.progress == 4


def test_closing_while_it_is_started_leaves_no_engine_behind(engine):
    backend = ServedBackend(engine)
    engine.dead, engine.start_seconds = True, 0.2
    sample(backend, 1)
    outbox = request_while_it_is_started(backend, engine)
    backend.close()
    assert outbox.get(timeout=60).finish_reason == "abort"
    assert (engine.starts, engine.opened) == (1, False)


def test_two_samples_of_one_id_under_way_are_an_error_of_the_second(backend):
    requests = [SampleRequest("run/0/a/0", 0, (5, i), PARAMS) for i in range(2)]
    outbox: queue.SimpleQueue = queue.SimpleQueue()
    backend.pause("wait")
    for request in requests:
        backend.start(request, outbox)
    assert outbox.get(timeout=60).error == "run/0/a/0: ValueError: a sample of this id is under way"
    backend.resume()
    assert outbox.get(timeout=60).finish_reason == "length"


def test_it_comes_back_with_the_directory_of_the_last_update(backend, engine, newer):
    backend.update_weights(newer, 3)
    engine.dead = True
    sample(backend, 1)
    assert_drawn(sample(backend), str(newer), 3)
    assert engine.updates[-1] == (newer, 3, False)


def test_it_says_that_it_lost_a_state_dict_until_it_gets_one(backend, engine, model):
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    backend.update_weights(weights, 3)
    engine.dead = True
    sample(backend, 1)
    with pytest.raises(EngineDeadError, match=r"has lost the weights of version 3, .* call update_weights"):
        sample(backend)
    backend.update_weights(weights, 4)
    assert_drawn(sample(backend), "dict", 4)
    assert engine.starts == 2


def test_it_comes_back_with_a_state_dict_that_nobody_writes_to(backend, engine, model):
    weights = Unchanging(AutoModelForCausalLM.from_pretrained(model).state_dict())
    backend.update_weights(weights, 3)
    engine.dead = True
    sample(backend, 1)
    assert_drawn(sample(backend), "dict", 3)
    assert engine.updates[-1][0] is weights


def test_a_failed_update_is_followed_by_a_start_with_the_weights_before(backend, engine, newer, model):
    backend.update_weights(newer, 3)
    engine.fail_update = True
    with pytest.raises(EngineDeadError, match="version 4 failed: shape mismatch; it is started again"):
        backend.update_weights(model, 4)
    engine.fail_update = False
    assert_drawn(sample(backend), str(newer), 3)
    backend.update_weights(model, 4)
    assert_drawn(sample(backend), "start", 4)


def test_one_that_cannot_be_started_says_why_each_time_it_is_asked(backend, engine):
    engine.dead = engine.hopeless = True
    sample(backend, 1)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="dead: its thread has ended; start it again: out of memory"):
            sample(backend)
    engine.hopeless = False
    assert_drawn(sample(backend), "start", 0)


def test_an_update_that_keeps_what_runs_computes_its_keys_again_or_is_refused(backend, engine, newer):
    with pytest.raises(ValueError, match=r"kv=.keep.: Fake 1\.0 drops every key and value with the weights"):
        backend.update_weights(newer, 1, in_flight="keep")
    assert engine.updates == []
    backend.update_weights(newer, 1, in_flight="keep", kv="recompute")
    assert engine.updates[-1] == (newer, 1, True)


def test_weights_that_are_not_finite_are_refused_before_anything_is_applied(backend, engine, model):
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    next(iter(weights.values()))[0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        backend.update_weights(weights, 1, check_finite=True)
    weights.popitem()
    with pytest.raises(ValueError, match="missing"):
        backend.update_weights(weights, 1)
    assert engine.updates == []


class Stepped:
    """An engine for EngineThread: each step waits for `go`, and fails when `broken`."""

    def __init__(self) -> None:
        self.go, self.stepping = threading.Event(), threading.Event()
        self.work = self.broken = False
        self.ended: list = []
        self.thread = EngineThread(lambda: self.work, self.step, self.ended.append)

    def step(self) -> None:
        self.stepping.set()
        self.go.wait(20)
        self.work = False
        if self.broken:
            raise RuntimeError("CPU Generator does not use offset")

    def begin(self) -> None:
        self.work = True


def test_commands_that_wait_behind_a_step_that_fails_fail_too():
    engine = Stepped()
    engine.broken = True

    async def scenario() -> list:
        await engine.thread.do(engine.begin)
        await asyncio.to_thread(engine.stepping.wait, 20)
        waiting = [asyncio.ensure_future(engine.thread.do(lambda: 7)) for _ in range(3)]
        await asyncio.sleep(0)
        engine.go.set()
        found = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 20)
        with pytest.raises(EngineDeadError, match="does not use offset"):
            await engine.thread.do(lambda: 7)
        await engine.thread.stop()
        return found

    assert [type(error) for error in asyncio.run(scenario())] == [EngineDeadError] * 3
    assert [str(error) for error in engine.ended] == ["CPU Generator does not use offset"]


def test_a_command_whose_caller_has_left_is_skipped_and_the_next_one_runs():
    engine = Stepped()
    done: list = []

    async def scenario() -> None:
        await engine.thread.do(engine.begin)
        await asyncio.to_thread(engine.stepping.wait, 20)
        left = asyncio.ensure_future(engine.thread.do(lambda: done.append("left")))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        engine.go.set()
        await engine.thread.do(lambda: done.append("next"))
        with pytest.raises(ZeroDivisionError):
            await engine.thread.do(lambda: 1 / 0)
        await engine.thread.stop()

    asyncio.run(scenario())
    assert done == ["next"]
    assert engine.ended == [None]
