"""A client that is closed while another thread iterates: its call ends, with what it got and the rest aborted."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.backend import SampleRequest
from rollout.engine_model import describe_model
from rollout.loop_thread import LoopThread
from rollout.served_engine import ServedBackend
from storage import TraceDataset
from tests.engines.answers import PARAMS, requests_of
from tests.engines.fake_adapter import OwnedEngine

REQUESTS = [SampleRequest(f"run/0/{i}/0", 0, (5, i), PARAMS) for i in range(6)]


class Lingering(OwnedEngine):
    """Takes its time to be released, and to say its weight version."""

    owned = False

    def __init__(self, model: Path) -> None:
        super().__init__(describe_model(str(model)))
        self.capabilities = replace(self.capabilities, version_spans=False)
        self.closing, self.asked, self.go = threading.Event(), threading.Event(), threading.Event()
        self.slow = False

    async def weight_version(self) -> int:
        if self.slow:
            self.asked.set()
            await asyncio.Event().wait()
        return self.version

    async def close(self) -> None:
        self.closing.set()
        await asyncio.to_thread(self.go.wait, 20)
        await super().close()


def reasons(stream) -> list[str]:
    return [finished.trace.finish_reason for finished in stream]


@pytest.fixture
def lingering(model: Path) -> Lingering:
    return Lingering(model)


def test_what_is_left_of_a_stream_when_it_is_closed_comes_back_aborted(lingering):
    backend = ServedBackend(lingering, max_running_requests=2)
    stream = backend.stream(REQUESTS)
    assert next(stream).trace.finish_reason == "length"
    lingering.go.set()
    backend.close()
    assert sorted(reasons(stream))[:4] == ["abort"] * 4
    stream.abort()
    stream.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        backend.stream(REQUESTS)


def test_a_stream_that_goes_on_while_it_is_closed_ends(lingering):
    backend = ServedBackend(lingering, max_running_requests=2)
    stream = backend.stream(REQUESTS)
    next(stream)
    closing = threading.Thread(target=backend.close)
    closing.start()
    lingering.closing.wait(20)
    answered = lingering.progress
    assert sorted(reasons(stream))[:4] == ["abort"] * 4
    assert lingering.progress == answered
    lingering.go.set()
    closing.join(60)
    assert not closing.is_alive()


def test_a_call_whose_last_question_is_under_way_when_it_is_closed_ends(lingering):
    backend = ServedBackend(lingering)
    stream = backend.stream(REQUESTS)
    lingering.slow = True
    ended: list[list[str]] = []
    iterating = threading.Thread(target=lambda: ended.append(reasons(stream)))
    iterating.start()
    assert lingering.asked.wait(20)
    lingering.go.set()
    backend.close()
    iterating.join(60)
    assert ended == [["length"] * 6]


def test_a_call_over_http_fails_when_its_client_is_closed_and_commits_nothing(connect, server, tmp_path):
    client = connect(traces=tmp_path / "traces", max_running_requests=2)
    server.hold = True
    errors: list[Exception] = []

    def sample() -> None:
        try:
            client.sample([[5, i] for i in range(6)], sampling_params=PARAMS)
        except Exception as error:
            errors.append(error)

    sampling = threading.Thread(target=sample)
    sampling.start()
    while len(server.held) < 2:
        sampling.join(0.01)
    client.close()
    sampling.join(60)
    assert [str(error) for error in errors] == ["the client was closed while step 0 was sampled; nothing was committed"]
    assert len(TraceDataset(tmp_path / "traces")) == 0


def test_a_stream_over_http_ends_when_its_client_is_closed(connect, server):
    client = connect(max_running_requests=2)
    stream = client.backend.stream(requests_of(client, 6))
    next(stream)
    client.close()
    assert set(reasons(stream)) <= {"length", "abort"}


def test_work_for_a_loop_that_has_stopped_is_cancelled():
    loop = LoopThread("test")
    loop.stop()
    with pytest.raises(CancelledError):
        loop.call(asyncio.sleep(0))
