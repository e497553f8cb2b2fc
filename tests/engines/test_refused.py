"""What a served engine cannot do is an error when a client connects, or at the call, and the engine serves on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollout import SamplingParams
from rollout.engine_reply import EngineError
from tests.engines.answers import PARAMS, missing
from tests.engines.fakes import FakeSglang

OWN_CODE = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
class Config(Qwen3MoeConfig):
    model_type = "a_family_of_its_own"
class Model(Qwen3MoeForCausalLM):
    config_class = Config
"""


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


@pytest.mark.parametrize("engine", ["sglang", "vllm"], indirect=True)
def test_a_servers_checkpoint_that_is_seen_and_broken_is_named(connect, server, model, tmp_path):
    server.model_path = str(shutil.copytree(model, tmp_path / "broken"))
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "qwen3_')
    with pytest.raises(ValueError, match=r"its checkpoint '.*/broken' is seen from here too and cannot be read.* JSON"):
        connect()


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_servers_tokenizer_is_not_looked_at(connect, server, model, tmp_path):
    server.model_path = str(shutil.copytree(model, tmp_path / "served"))
    (tmp_path / "served" / "tokenizer.json").write_text("{")
    assert connect().sample([[5, 7]], sampling_params=PARAMS)[0].error is None


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
@pytest.mark.parametrize("vocab_size", [96, 64])
def test_a_servers_checkpoint_with_code_of_its_own_is_read_when_that_is_trusted(
    connect, server, model, tmp_path, monkeypatch, vocab_size, caplog
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    ours = with_own_code(model, tmp_path / "ours")
    server.model_path = str(with_own_code(model, tmp_path / "served", vocab_size=vocab_size))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        connect(model=ours)
    if vocab_size == 64:
        with pytest.raises(ValueError, match="of another model: it has token ids 64, need 96"):
            connect(model=ours, trust_remote_code=True)
        return
    client = connect(model=ours, trust_remote_code=True)
    assert client.info.trust_remote_code
    assert f"the server's model '{server.model_path}' may run its own code in this process" in caplog.text


def with_own_code(model: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config |= {"model_type": "a_family_of_its_own", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(OWN_CODE)
    return folder


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


def test_what_would_need_a_hold_on_the_engine_is_refused(connect):
    client = connect()
    for mode in ("keep", "yield"):
        with pytest.raises(ValueError, match=f"pause mode '{mode}': .* takes 'wait' or 'abort'"):
            client.pause(mode)
    with pytest.raises(ValueError, match="cannot sleep through this client"):
        client.sleep()
    with pytest.raises(ValueError, match="cannot sleep through this client"):
        client.wake()
    (trace,) = client.sample([[5, 7]], sampling_params=PARAMS)
    with pytest.raises(ValueError, match=r"resume 0 .*cannot repeat recorded routes: .* cannot be told which"):
        client.sample(resume=[trace], sampling_params=PARAMS.model_copy(update={"max_tokens": 9}))
    with pytest.raises(ValueError, match="a session needs an engine that can repeat recorded routes"):
        client.session()
    with pytest.raises(ValueError, match=r"cannot|repeat|prompt"):
        client.score([trace])
    assert client.sample([[5, 7]], sampling_params=PARAMS)[0].error is None


def test_a_pause_holds_requests_back_until_resume(connect, server):
    client = connect()
    asked = len(server.generated)
    client.pause("wait")
    stream = client.backend.stream(client._requests.check([[5, 7]], 1, PARAMS).requests(0, 0))
    stream._backend.start(stream._pending.popleft(), stream._outbox)
    client.stats()
    assert len(server.generated) == asked
    client.resume()
    assert stream._outbox.get(timeout=60).finish_reason == "length"
