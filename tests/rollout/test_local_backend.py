"""Stopping an engine from any thread: every caller gets an answer, nobody waits for ever."""

import threading
import time

import pytest

from rollout.backend import SampleRequest
from rollout.local_backend import LocalBackend
from rollout.sampling import SamplingParams
from rollout.tiny_moe import MODEL_PATH
from tests.rollout.threads import no_thread_left

LONG = SamplingParams(max_tokens=100, ignore_eos=True, seed=0)


def requests(count: int, params=LONG) -> list[SampleRequest]:
    return [SampleRequest(f"run/0/0-{i}/0", 0, (4, 5, 13, 6, 14), params) for i in range(count)]


@pytest.fixture
def backend():
    with no_thread_left():
        backend = LocalBackend(MODEL_PATH, max_running_requests=4)
        yield backend
        backend.close()


def consume(backend, count: int, answers: list) -> threading.Thread:
    """A thread that streams `count` requests and notes how it ended."""

    def work():
        try:
            answers.append([f.trace.finish_reason for f in backend.stream(requests(count))])
        except RuntimeError as error:
            answers.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_close_ends_running_streams_with_aborted_traces(backend):
    stream = backend.stream(requests(6))
    first = next(stream)
    assert first.trace.finish_reason == "length"
    backend.close()
    rest = [finished.trace for finished in stream]
    assert len(rest) == 5
    assert "abort" in {trace.finish_reason for trace in rest}
    for trace in rest:
        assert trace.route_len == trace.num_rows


def test_streams_that_begin_while_the_engine_closes_all_get_an_answer():
    for pause in (0.0, 0.002, 0.02):
        backend, answers = LocalBackend(MODEL_PATH, max_running_requests=4), []
        threads = [consume(backend, 3, answers) for _ in range(8)]
        time.sleep(pause)
        backend.close()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a stream waits for ever"
        assert len(answers) == 8
        for answer in answers:
            assert answer == "this engine is closed" or set(answer) <= {"abort", "length"}


def test_an_engine_that_dies_tells_all_its_streams_why(backend, monkeypatch):
    answers = []

    def broken():
        raise RuntimeError("the scheduler lost a row")

    monkeypatch.setattr(backend._built.engine, "step", broken)
    threads = [consume(backend, 3, answers) for _ in range(4)]
    for thread in threads:
        thread.join(timeout=60)
    assert len(answers) == 4
    assert set(answers) <= {"the scheduler lost a row", "this engine has stopped: the scheduler lost a row"}
    assert "the scheduler lost a row" in answers
    with pytest.raises(RuntimeError, match="this engine has stopped: the scheduler lost a row") as caught:
        next(backend.stream(requests(1)))
    assert str(caught.value.__cause__) == "the scheduler lost a row"


def test_closing_twice_and_from_two_threads_is_fine(backend):
    threads = [threading.Thread(target=backend.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
