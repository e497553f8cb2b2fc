"""A served engine behind the client: the contract, load and aborts."""

from __future__ import annotations

import threading

import pytest

from rollout import RolloutClient
from storage import SpecMismatchError, TraceDataset
from tests.engines.answers import PARAMS, PROMPTS, assert_faithful, requests_of
from tests.engines.fakes import FakeServer, FakeSglang


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
    stream = client.backend.stream(requests_of(client, 3))
    result: list = []
    thread = threading.Thread(target=lambda: result.extend(stream))
    thread.start()
    while len(server.held) < 3:
        thread.join(0.01)
    stream.abort()
    thread.join(60)
    assert [f.trace.finish_reason for f in result] == ["abort"] * 3
    for finished in result:
        assert finished.trace.route_len == 3 + 3 - 1


def test_an_abort_that_overtakes_its_request_is_said_again(connect, server):
    client = connect()
    server.hold, server.late = True, 0.15
    (request,) = requests_of(client, 1)
    stream = client.backend.stream([request])
    thread = threading.Thread(target=lambda: result.extend(stream), daemon=True)
    result: list = []
    thread.start()
    while not server.running:
        thread.join(0.005)
    client.abort([request.sample_id])
    assert not server.held
    thread.join(60)
    assert [finished.trace.finish_reason for finished in result] == ["abort"]


def test_an_abort_ends_exactly_the_requests_of_its_stream(connect, server):
    client = connect()
    server.hold = True
    found: dict[str, list] = {"l": [], "k": []}
    streams = {key: client.backend.stream(requests_of(client, 1, key=key)) for key in found}
    threads = [threading.Thread(target=lambda k=k: found[k].extend(streams[k]), daemon=True) for k in found]
    for thread in threads:
        thread.start()
    while len(server.held) < 2:
        threads[0].join(0.01)
    streams["l"].abort()
    threads[0].join(60)
    assert [finished.trace.finish_reason for finished in found["l"]] == ["abort"]
    ended = [name for name, event in server.held.items() if event.is_set()]
    assert set(aborted(server)) == set(ended)
    assert len(ended) == 1
    assert found["k"] == []
    assert len(set(map(len, server.held))) == 1  # as an SGLang id is a prefix of none but itself
    server.let_go()
    threads[1].join(60)
    assert [finished.trace.finish_reason for finished in found["k"]] == ["length"]


def test_leaving_a_stream_aborts_what_it_began(connect, server):
    client = connect()
    server.hold = True
    stream = client.backend.stream(requests_of(client, 3))
    thread = threading.Thread(target=lambda: (next(stream), stream.close()))
    thread.start()
    while len(server.held) < 3:
        thread.join(0.01)
    first, *others = server.held
    server.let_go(first)
    thread.join(60)
    while client.stats()["requests_running"]:
        thread.join(0.01)
    assert sorted(set(aborted(server))) == sorted(others)


def aborted(server: FakeServer) -> list[str]:
    """The ids that were to end, as the server was told them."""
    bodies = [body for path, body, _ in server.seen if path in ("/abort_request", "/abort_requests")]
    return [name for body in bodies for name in body.get("request_ids", [body.get("rid")])]
