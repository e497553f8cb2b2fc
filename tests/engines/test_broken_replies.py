"""Broken answers and broken servers: one clear error each, the others finish, and the client goes on."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
from aiohttp import web

from storage import TraceDataset
from tests.engines.answers import PARAMS, PROMPTS, assert_faithful, missing, on_bytes, spoilt


def other_ids(body):
    if "meta_info" in body:
        body["meta_info"]["output_token_logprobs"][0][1] += 1
    elif "content" in body["choices"][0]["logprobs"]:
        body["choices"][0]["logprobs"]["content"][0]["token"] = "token_id:95"
    else:
        body["choices"][0]["logprobs"]["tokens"][0] = "token_id:95"
    return body


def not_finite(body):
    if "meta_info" in body:
        body["meta_info"]["output_token_logprobs"][0][0] = float("nan")
    elif "content" in body["choices"][0]["logprobs"]:
        body["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
    else:
        body["choices"][0]["logprobs"]["token_logprobs"][0] = float("nan")
    return body


def zero_routes(data: bytes) -> bytes:
    head = 128 if data.startswith(b"\x93NUMPY") else 0
    return data[:head] + bytes(len(data) - head)


def high_ids(data: bytes) -> bytes:
    head = 128 if data.startswith(b"\x93NUMPY") else 0
    return data[:head] + b"\x09" + data[head + 1 :]


def as_dtype(dtype: str):
    """Routes of another dtype: an npy file says so, raw bytes have another length or mean other numbers."""

    def change(data: bytes) -> bytes:
        if not data.startswith(b"\x93NUMPY"):
            return np.frombuffer(data, "<i4").astype(dtype).tobytes()
        file = io.BytesIO()
        np.lib.format.write_array(file, np.lib.format.read_array(io.BytesIO(data)).astype(dtype))
        return file.getvalue()

    return lambda body: spoilt(body, on_bytes(change))


CORRUPTIONS = {
    "wider integers": (as_dtype("<i8"), r"routed_experts is int64|routed_experts holds 160 bytes, need 80"),
    "floats": (as_dtype("<f4"), r"routed_experts is float32|need \[0, 8\)"),
    "missing key": (missing, "start the server with --enable-return-routed-experts"),
    "short": (lambda b: spoilt(b, on_bytes(lambda d: d[:-8])), "routed_experts"),
    "truncated base64": (lambda b: spoilt(b, lambda text: text[:-3]), "no base64"),
    "all zero": (lambda b: spoilt(b, on_bytes(zero_routes)), "0: routes were not captured"),
    "id out of range": (lambda b: spoilt(b, on_bytes(high_ids)), r"need \[0, 8\)"),
    "logprobs of other tokens": (other_ids, "logprobs belong to tokens"),
    "logprob not finite": (not_finite, "logprob of completion token 0 is nan"),
    "no reply at all": (lambda b: {"unexpected": 1}, "the answer lacks"),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupted_reply_is_one_clear_error_and_the_others_finish(connect, server, tmp_path, kind):
    client = connect(traces=tmp_path / "traces")
    change, message = CORRUPTIONS[kind]
    server.spoil = lambda prompt, body: change(body) if prompt == [6, 7] else body
    good, bad = client.sample(PROMPTS, sampling_params=PARAMS)
    assert_faithful(good, server)
    assert bad.finish_reason == "error"
    assert bad.completion_ids == []
    assert bad.routed_experts is None
    with pytest.raises(ValueError, match=message):
        raise ValueError(bad.error)
    assert "run/0/0-1/0" in bad.error
    assert list(TraceDataset(tmp_path / "traces").iter()) == [good]


def test_an_error_500_fails_its_request_and_the_others_finish(connect, server):
    client = connect()
    broken = {"error": {"message": "EngineCore encountered an issue", "code": 500}}
    server.spoil = lambda prompt, body: web.json_response(broken, status=500) if prompt == [6, 7] else body
    traces = client.sample([[6, 7], *([5, i] for i in range(20))], sampling_params=PARAMS)
    assert [trace.finish_reason for trace in traces] == ["error"] + ["length"] * 20
    assert "500: EngineCore encountered an issue" in traces[0].error
    server.spoil = lambda prompt, body: body
    assert_faithful(client.sample([[6, 7]], sampling_params=PARAMS)[0], server)


def test_a_server_that_hangs_fails_what_it_held_when_the_time_for_an_answer_is_over(connect, server):
    client = connect(timeout=0.5)
    assert client.backend.progress is None  # nobody is to kill an actor for it: the server is others' to start
    server.hold = True
    traces = client.sample(PROMPTS, sampling_params=PARAMS)
    assert [trace.finish_reason for trace in traces] == ["error", "error"]
    assert all("no answer within 0.5 s" in trace.error for trace in traces)
    server.hold = False
    assert_faithful(client.sample([[6, 7]], sampling_params=PARAMS)[0], server)


def test_a_killed_server_fails_what_it_held_and_the_client_recovers_when_it_returns(connect, server):
    client = connect()
    server.hold = True
    result: list = []
    thread = threading.Thread(target=lambda: result.extend(client.sample(PROMPTS, sampling_params=PARAMS)))
    thread.start()
    while len(server.held) < 2:
        thread.join(0.01)
    server.stop()
    thread.join(30)
    assert [trace.finish_reason for trace in result] == ["error", "error"]
    assert all(trace.sample_id in trace.error and "the connection broke" in trace.error for trace in result)
    server.hold = False
    server.start()
    for trace in client.sample(PROMPTS, sampling_params=PARAMS):
        assert_faithful(trace, server)
