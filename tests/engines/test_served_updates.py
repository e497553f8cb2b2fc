"""Weights of a served engine: updates, what refuses them, and what becomes of them when a server is started again."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout.engine_reply import EngineDeadError
from rollout.engine_versions import CONDEMNED
from storage import TraceDataset
from tests.engines.answers import PARAMS, PROMPTS, assert_faithful, requests_of
from tests.engines.fakes import FakeSglang


@pytest.fixture
def newer(model, tmp_path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "newer"))


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
    with pytest.raises(EngineDeadError, match=r"version \d, need 5, found before the call ended: which answers"):
        client.sample([[5, 7]] * 8, sampling_params=PARAMS)
    assert len(TraceDataset(tmp_path / "traces")) == 0


def one_more(client):
    """Another call; it may fail."""
    with contextlib.suppress(EngineDeadError):
        list(client.backend.stream(requests_of(client, 1, "other")))


def connection_breaks(server):
    server.cut.update({"/inference/v1/generate": 1, "/v1/completions": 1})


def another_call_finds_another_clients_update(server, client, newer):
    server.version = "9"
    one_more(client)


def another_call_finds_a_server_that_was_started_again_and_reloads(server, client, newer):
    server.forget()
    one_more(client)


def its_own_request_finds_a_server_that_was_started_again(server, client, newer):
    server.forget()
    connection_breaks(server)


def an_update_of_ours_finds_another_clients(server, client, newer):
    server.version = "9"
    with pytest.raises(EngineDeadError, match="others updated it"):
        client.update_weights(newer, version=6)
    server.version = "5"


def another_clients_update_fails(server, client, newer):
    server.version = CONDEMNED


UNDER_A_CALL = [
    another_call_finds_another_clients_update,
    another_call_finds_a_server_that_was_started_again_and_reloads,
    its_own_request_finds_a_server_that_was_started_again,
    an_update_of_ours_finds_another_clients,
    another_clients_update_fails,
]


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize("answers", [2, 3])
@pytest.mark.parametrize("meanwhile", UNDER_A_CALL)
def test_strange_weights_fail_every_call_that_ran_then_whoever_found_them(connect, server, newer, meanwhile, answers):
    """With two answers the call ends behind what happens, with three it goes on."""
    client = connect(max_running_requests=1)
    client.update_weights(newer, version=5)
    stream = client.backend.stream(requests_of(client, answers))
    next(stream)
    meanwhile(server, client, newer)
    with pytest.raises(EngineDeadError, match=r"found before the call ended: which answers are of which weights"):
        list(stream)
    server.version = "5"
    list(client.backend.stream(requests_of(client, 2, "next")))


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_call_goes_on_over_a_broken_connection_and_over_an_update_of_this_client(connect, server, newer):
    client = connect(max_running_requests=1)
    client.update_weights(newer, version=5)
    stream = client.backend.stream(requests_of(client, 4))
    next(stream)
    connection_breaks(server)
    assert "the connection broke" in next(stream).trace.error
    assert next(stream).trace.weight_version == 5
    client.update_weights(newer, version=6)
    assert [finished.trace.weight_version for finished in stream] == [6]


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
