"""A served engine behind the client: the contract, aborts, load, updates, and what broken answers lead to."""

from __future__ import annotations

import base64
import io
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from rollout import RolloutClient, SamplingParams
from rollout.engine_reply import EngineDeadError, EngineError
from rollout.rng import stream_key
from storage import SpecMismatchError, TraceDataset
from tests.engines.fakes import Drawn, FakeServer, FakeSglang

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
PROMPTS = [[5, 7, 9], [6, 7]]


def expected(trace, server: FakeServer, weights: str = "start") -> Drawn:
    """The fake model's own answer, from the seed that belongs to this sample."""
    bits = 31 if isinstance(server, FakeSglang) else 63
    seed = stream_key(trace.seed, trace.sample_id) & (2**bits - 1)
    return Drawn(trace.prompt_ids, len(trace.completion_ids), seed, weights, server.shape)


def assert_faithful(trace, server: FakeServer, weights: str = "start") -> None:
    drawn = expected(trace, server, weights)
    assert trace.completion_ids == drawn.ids
    assert trace.logprobs.tolist() == drawn.logprobs.tolist()
    assert trace.routed_experts.dtype == np.uint8
    assert trace.routed_experts.tolist() == drawn.routes.tolist()


def test_traces_hold_what_the_server_drew_and_the_dataset_verifies(connect, server, tmp_path):
    client = connect(traces=tmp_path / "traces")
    traces = client.sample(PROMPTS, num_samples=2, sampling_params=PARAMS)
    assert [trace.sample_id for trace in traces] == ["run/0/0-0/0", "run/0/0-0/1", "run/0/0-1/0", "run/0/0-1/1"]
    for trace in traces:
        assert_faithful(trace, server)
        assert trace.route_len == len(trace.token_ids) - 1
        assert trace.finish_reason == "length"
        assert trace.raw_logprobs.tolist() == trace.logprobs.tolist()
    dataset = TraceDataset(tmp_path / "traces")
    assert dataset.verify() == []
    assert not dataset.frozen_recompute
    assert dataset.slot_order == ("unmeasured" if isinstance(server, FakeSglang) else "differs")
    assert all(dataset[trace.sample_id] == trace for trace in traces)


def test_a_dataset_that_promises_frozen_routes_takes_none_that_are_not(connect, model, tmp_path):
    with RolloutClient.local(model, traces=tmp_path / "traces", dtype="float32") as own:
        own.sample([[5, 7]], sampling_params=PARAMS)
    assert TraceDataset(tmp_path / "traces").frozen_recompute
    with pytest.raises(SpecMismatchError, match="promises routes that survive recomputation"):
        connect(traces=tmp_path / "traces")


def test_512_requests_that_wait_at_once_all_arrive(connect, server):
    client = connect()
    server.hold = True
    prompts = [[1 + i % 90, i // 90] for i in range(600)]
    traces: list = []
    thread = threading.Thread(target=lambda: traces.extend(client.sample(prompts, sampling_params=PARAMS)))
    thread.start()
    while len(server.held) < 512:
        thread.join(0.01)
    assert client.stats()["requests_running"] == 512
    server.let_go()
    thread.join(60)
    assert server.peak == 512
    assert [trace.prompt_ids for trace in traces] == prompts
    assert len({trace.sample_id for trace in traces}) == 600
    for trace in traces:
        assert_faithful(trace, server)


def test_a_consumer_that_pauses_holds_a_bounded_number_of_requests(connect, server):
    client = connect(max_running_requests=8)
    before = len(server.generated)
    stream = client.stream([[1 + i] for i in range(40)], sampling_params=PARAMS)
    next(stream)
    assert len(server.generated) - before <= 8
    assert len(list(stream)) == 39


def test_abort_ends_requests_with_the_rows_they_have(connect, server):
    client = connect()
    server.hold = True
    stream = client.backend.stream(_requests(client, 3))
    result: list = []
    thread = threading.Thread(target=lambda: result.extend(stream))
    thread.start()
    while len(server.held) < 3:
        thread.join(0.01)
    stream.abort()
    thread.join(20)
    assert [f.trace.finish_reason for f in result] == ["abort"] * 3
    for finished in result:
        assert finished.trace.route_len == 3 + 3 - 1


def test_an_abort_that_overtakes_its_request_is_said_again(connect, server):
    client = connect()
    server.hold, server.late = True, 0.15
    (request,) = _requests(client, 1)
    stream = client.backend.stream([request])
    thread = threading.Thread(target=lambda: result.extend(stream), daemon=True)
    result: list = []
    thread.start()
    while not server.running:
        thread.join(0.005)
    client.abort([request.sample_id])
    assert not server.held
    thread.join(5)
    assert [finished.trace.finish_reason for finished in result] == ["abort"]


def test_an_abort_ends_exactly_the_requests_of_its_stream(connect, server):
    client = connect()
    server.hold = True
    found: dict[str, list] = {"l": [], "k": []}
    streams = {key: client.backend.stream(_requests(client, 1, key=key)) for key in found}
    threads = [threading.Thread(target=lambda k=k: found[k].extend(streams[k]), daemon=True) for k in found]
    for thread in threads:
        thread.start()
    while len(server.held) < 2:
        threads[0].join(0.01)
    streams["l"].abort()
    threads[0].join(20)
    assert [finished.trace.finish_reason for finished in found["l"]] == ["abort"]
    ended = [name for name, event in server.held.items() if event.is_set()]
    assert set(aborted(server)) == set(ended)
    assert len(ended) == 1
    assert found["k"] == []
    assert len(set(map(len, server.held))) == 1  # as an SGLang id is a prefix of none but itself
    server.let_go()
    threads[1].join(20)
    assert [finished.trace.finish_reason for finished in found["k"]] == ["length"]


def test_leaving_a_stream_aborts_what_it_began(connect, server):
    client = connect()
    server.hold = True
    stream = client.backend.stream(_requests(client, 3))
    thread = threading.Thread(target=lambda: (next(stream), stream.close()))
    thread.start()
    while len(server.held) < 3:
        thread.join(0.01)
    first, *others = server.held
    server.let_go(first)
    thread.join(20)
    while client.stats()["requests_running"]:
        thread.join(0.01)
    assert sorted(set(aborted(server))) == sorted(others)


def aborted(server: FakeServer) -> list[str]:
    """The ids that were to end, as the server was told them."""
    bodies = [body for path, body, _ in server.seen if path in ("/abort_request", "/abort_requests")]
    return [name for body in bodies for name in body.get("request_ids", [body.get("rid")])]


def _requests(client: RolloutClient, count: int, key: str = "p"):
    prompts = [[5, 7, 9]] * count
    keys = [f"{key}{i}" for i in range(count)]
    return client._requests.check(prompts, 1, PARAMS, keys).requests(0, 0)


def spoilt(body, change):
    """`change(routes bytes) -> bytes` applied to the routes of a reply of either engine."""
    holder = body["meta_info"] if "meta_info" in body else body["choices"][0]
    holder["routed_experts"] = change(holder["routed_experts"])
    return body


def on_bytes(change):
    return lambda text: base64.b64encode(change(base64.b64decode(text))).decode()


def missing(body):
    holder = body["meta_info"] if "meta_info" in body else body["choices"][0]
    del holder["routed_experts"]
    return body


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


@pytest.mark.parametrize("noticed", [True, False])
def test_a_server_that_was_started_again_gets_the_weights_of_the_last_update_again(
    connect, server, newer, noticed, monkeypatch
):
    monkeypatch.setattr("rollout.http_engine.BACKOFF_SECONDS", 0.01)
    client = connect()
    client.update_weights(newer, version=5)
    server.stop()
    if noticed:
        with pytest.raises(EngineDeadError, match="cannot connect"):
            client.sample(PROMPTS, sampling_params=PARAMS)
    server.forget()
    server.start()
    for trace in client.sample(PROMPTS, sampling_params=PARAMS):
        assert_faithful(trace, server, weights=str(newer))
        assert trace.weight_version == 5
    assert server.version == "5"


def test_a_server_that_another_client_updated_is_refused(connect, server, newer):
    client = connect()
    client.update_weights(newer, version=5)
    server.version = "9"
    with pytest.raises(EngineDeadError, match="it has weight version 9, need 5: others updated it, connect anew"):
        client.sample(PROMPTS, sampling_params=PARAMS)


@pytest.fixture
def newer(model, tmp_path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "newer"))


def test_an_update_rehearses_then_loads_and_rows_carry_the_version(connect, server, newer):
    client = connect()
    client.update_weights(newer, version=5)
    assert server.loads == 2
    (trace,) = client.sample([[5, 7]], sampling_params=PARAMS)
    assert_faithful(trace, server, weights=str(newer))
    assert trace.weight_versions == [(5, 0, 5)]
    client.update_weights(newer, version=6)
    assert server.loads == 3


def test_an_engine_that_reloads_its_own_weights_wrongly_is_refused(connect, server, newer):
    client = connect()
    server.drifts = True
    with pytest.raises(EngineDeadError, match=r"loading its own weights again changed the model .* refused"):
        client.update_weights(newer, version=1)
    with pytest.raises(EngineDeadError, match="start it again"):
        client.sample([[5, 7]], sampling_params=PARAMS)
    assert not client.info.capabilities.inplace_update
    loads = server.loads
    with pytest.raises(ValueError, match="takes no weights in place: loading its own weights again changed the model"):
        client.update_weights(newer, version=2)
    assert server.loads == loads


@pytest.mark.parametrize("found", ["9", "default"])
def test_weights_that_others_change_under_a_call_fail_it_and_commit_nothing(connect, server, newer, found, tmp_path):
    """Another client's update, or a server that was started again between two requests; SGLang's answers say it."""
    client = connect(traces=tmp_path / "traces")
    client.update_weights(newer, version=5)
    server.spoil = lambda prompt, body: (setattr(server, "version", found), body)[1]
    if isinstance(server, FakeSglang):
        versions = [t.weight_version for t in client.sample([[5, 7]] * 8, sampling_params=PARAMS)]
        assert set(versions) == {5, int(found) if found != "default" else 0}
        return
    with pytest.raises(EngineDeadError, match=r"has weight version \d, need 5 when the call ended: which answers are"):
        client.sample([[5, 7]] * 8, sampling_params=PARAMS)
    assert len(TraceDataset(tmp_path / "traces")) == 0


def test_a_failed_update_leaves_a_dead_engine_for_every_client_until_it_is_started_again(connect, server, newer):
    client = connect()
    server.fail_update = True
    with pytest.raises(EngineDeadError, match="update to weight version 1 failed"):
        client.update_weights(newer, version=1)
    with pytest.raises(EngineDeadError, match=r"this engine is dead.*start it again"):
        client.sample([[5, 7]], sampling_params=PARAMS)
    with pytest.raises(ValueError, match="weights were broken by a failed update"):
        connect()
    server.fail_update = False
    server.stop()
    server.forget()
    server.start()
    client.update_weights(newer, version=1)
    assert_faithful(client.sample([[5, 7]], sampling_params=PARAMS)[0], server, weights=str(newer))


def test_weights_that_do_not_fit_are_refused_before_the_engine_is_asked(connect, server, checkpoint, tmp_path):
    client = connect()
    with pytest.raises(ValueError, match="do not fit the served model"):
        client.update_weights(checkpoint("qwen3_moe", moe_intermediate_size=24), version=1)
    (tmp_path / "quantised").mkdir()
    save_file({"model.norm.weight": torch.ones(4, dtype=torch.int8)}, tmp_path / "quantised" / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"'model.norm.weight' in .* is I8, need one of \('F64', 'F32', 'BF16', 'F16'\)"
    ):
        client.update_weights(tmp_path / "quantised", version=1)
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        client.update_weights("/nonexistent", version=1)
    with pytest.raises(ValueError, match="save_pretrained"):
        client.update_weights({}, version=1)
    assert server.loads == 0
    assert client.sample([[5, 7]], sampling_params=PARAMS)[0].finish_reason == "length"


def test_a_refused_cache_flush_is_repaired_by_sglang_and_fatal_for_vllm(connect, server, newer):
    client = connect()
    server.refuse_flush = True
    if isinstance(server, FakeSglang):
        client.update_weights(newer, version=1)
        paths = [path for path, *_ in server.seen]
        assert paths.index("/pause_generation") < paths.index("/flush_cache") < paths.index("/update_weight_version")
        (trace,) = client.sample([[5, 7]], sampling_params=PARAMS)
        assert trace.weight_version == 1
    else:
        with pytest.raises(EngineDeadError, match="kept its prefix cache"):
            client.update_weights(newer, version=1)


def test_the_key_is_sent_and_a_wrong_one_is_named(connect, server):
    server.key = "k"
    with pytest.raises((EngineError, ValueError), match="Unauthorized; pass the server's key as api_key="):
        connect(api_key="wrong")
    client = connect(api_key="k")
    assert client.sample([[5, 7]], sampling_params=PARAMS)[0].finish_reason == "length"


def test_a_server_without_capture_says_what_to_start_it_with(connect, server):
    server.spoil = lambda prompt, body: missing(body)
    with pytest.raises(ValueError, match="--enable-return-routed-experts"):
        connect()


def test_another_model_than_the_servers_is_refused(connect, checkpoint):
    with pytest.raises(ValueError, match="cannot serve model"):
        connect(model=checkpoint("qwen3_moe", num_hidden_layers=3))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_experts": 4}, r"experts \[4, 4\], need \[8, 8\]"), ({"vocab_size": 64}, "token ids 64, need 96")],
)
def test_a_server_with_fewer_experts_or_tokens_is_refused_where_its_checkpoint_is_seen(
    connect, server, checkpoint, change, message
):
    """Its routes would fit: all its ids are below the number of experts."""
    server.model_path = str(checkpoint("qwen3_moe", **change))
    with pytest.raises(ValueError, match=f"is of another model: it has {message}"):
        connect()


def test_an_old_server_is_refused(connect, server):
    server.release_text = "0.4.9" if isinstance(server, FakeSglang) else "0.9.1"
    with pytest.raises(ValueError, match=rf"{server.release_text} is too old for recorded routes; start version"):
        connect()


def test_a_dense_model_is_refused(connect, tmp_path):
    from transformers import Qwen3Config

    Qwen3Config(num_hidden_layers=1, hidden_size=8, vocab_size=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no MoE router"):
        connect(model=tmp_path)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(prompt_logprobs=0), "cannot record prompt_logprobs"),
        (SamplingParams(max_tokens=0), "max_tokens must be at least 1"),
        (SamplingParams(logprobs=2), "cannot do logprobs=2"),
    ],
)
def test_what_an_engine_cannot_do_is_an_error_at_the_call(connect, params, message):
    with pytest.raises(ValueError, match=f"prompt 0: .* {message}"):
        connect().sample([[5, 7]], sampling_params=params)


def test_an_update_in_mid_flight_that_would_need_spans_is_refused(connect, server, newer):
    client = connect()
    with pytest.raises(ValueError, match=r"in_flight=.keep.: .* would not say which rows are of which weights"):
        client.update_weights(newer, 1, in_flight="keep")
    assert server.loads == 0


def test_an_update_is_checked_whole_by_its_first_half(connect, server, newer, checkpoint):
    client = connect()
    with pytest.raises(ValueError, match="do not fit the served model"):
        client.backend.prepare_update(checkpoint("qwen3_moe", moe_intermediate_size=24), 1).__enter__()
    with pytest.raises(ValueError, match="weight version 0 is not above the current 0; force=True allows it"):
        client.backend.prepare_update(newer, 0).__enter__()
    with client.backend.prepare_update(newer, 0, force=True) as apply:
        assert server.loads == 0
        apply("wait", "keep")
    assert server.loads == 2
