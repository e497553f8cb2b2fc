"""What is asked again, what never is, and when waiting ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.engine_reply import EngineDeadError, EngineError
from rollout.http_engine import HttpEngine
from tests.engines.fakes import FakeVllm

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
GENERATE = "/inference/v1/generate"
BODY = {"request_id": "rx-1", "token_ids": [5, 7], "sampling_params": {"max_tokens": 4, "seed": 3, "top_k": 0}}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.http_engine.BACKOFF_SECONDS", 0.005)


@pytest.fixture
def vllm() -> Iterator[FakeVllm]:
    server = FakeVllm()
    yield server
    server.stop()


def call(server: FakeVllm, method: str, path: str, body: Any = None, timeout: float = 20) -> Any:
    async def once() -> Any:
        http = HttpEngine(server.url, None, 4, timeout)
        try:
            return await http.call(method, path, body)
        finally:
            await http.close()

    return asyncio.run(once())


def asked(server: FakeVllm, path: str) -> int:
    return sum(seen == path for seen, *_ in server.seen)


def test_a_server_that_is_full_is_asked_again_until_it_takes_the_request(vllm):
    vllm.full[GENERATE] = 3
    assert len(call(vllm, "POST", GENERATE, BODY)["choices"][0]["token_ids"]) == 4
    assert asked(vllm, GENERATE) == 4
    vllm.full[GENERATE] = 4
    with pytest.raises(EngineError, match=r"generate: 503: The request queue is full\.") as caught:
        call(vllm, "POST", GENERATE, BODY)
    assert not isinstance(caught.value, EngineDeadError)
    assert asked(vllm, GENERATE) == 8


def test_a_post_that_arrived_is_never_sent_twice(vllm):
    vllm.cut[GENERATE] = 1
    with pytest.raises(EngineDeadError, match=r"generate: the connection broke: ClientPayloadError"):
        call(vllm, "POST", GENERATE, BODY)
    assert asked(vllm, GENERATE) == 1


def test_a_get_is_asked_again_when_its_connection_breaks(vllm):
    vllm.cut["/weight_info"] = 3
    assert call(vllm, "GET", "/weight_info") == {"weight_version": "default"}
    assert asked(vllm, "/weight_info") == 4


def test_waiting_for_an_answer_ends(vllm):
    vllm.hold = True
    with pytest.raises(EngineError, match=r"POST http://.*/generate: no answer within 0\.1 s"):
        call(vllm, "POST", GENERATE, BODY, timeout=0.1)
    assert asked(vllm, GENERATE) == 1


def test_a_server_that_dies_in_the_middle_of_an_answer_fails_that_request_alone(connect, server, tmp_path):
    """The others go on, and so does whoever asks next."""
    client = connect(traces=tmp_path / "traces")
    path = server.generated[-1]
    server.cut[path] = 1
    traces = client.sample([[5, 1 + i] for i in range(8)], sampling_params=PARAMS)
    (failed,) = [trace for trace in traces if trace.error]
    assert "the connection broke" in failed.error
    assert failed.sample_id in failed.error
    assert (failed.finish_reason, failed.completion_ids) == ("error", [])
    assert [trace.error for trace in client.sample([[5, 7]], sampling_params=PARAMS)] == [None]
