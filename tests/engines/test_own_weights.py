"""The rehearsal loads the weights that the engine was started with: from where the engine finds them, also a hub id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rollout.engine_model import describe_model
from rollout.served_engine import ServedBackend
from rollout.served_weights import check_checkpoint
from rollout.vllm_extension import LoadExtension
from rollout.vllm_in_process import VllmInProcess
from rollout.vllm_load import load
from tests.engines.fake_adapter import OwnedEngine

HUB_ID = "Qwen/Qwen3-30B-A3B"


@pytest.fixture
def hub_model(model: Path):
    """The model as it is known when only its config and tokenizer were read, from a hub id."""
    return replace(describe_model(str(model)), path=HUB_ID)


def test_a_model_of_the_hub_takes_updates_from_a_directory(hub_model, model):
    engine = OwnedEngine(hub_model)
    backend = ServedBackend(engine)
    backend.update_weights(model, version=1)
    backend.close()
    assert [source for source, *_ in engine.updates] == ["its own", model]


def test_a_server_that_has_its_model_elsewhere_rehearses_with_its_own_path(connect, server, model):
    server.model_path = "/on/the/server"
    client = connect()
    client.update_weights(model, version=1)
    bodies = [body for path, body, _ in server.seen if path in ("/collective_rpc", "/update_weights_from_disk")]
    paths = [body.get("model_path") or body["kwargs"].get("path") for body in bodies]
    assert [path for path in paths if path] == ["/on/the/server", str(model)]


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_vllm_that_made_a_directory_of_its_hub_id_rehearses_with_that(connect, server, model):
    """As with HF_HUB_OFFLINE=1: /v1/models goes on to name the hub id."""
    server.model_path, server.loads_from = HUB_ID, "/cache/snapshots/abc"
    client = connect()
    client.update_weights(model, version=1)
    loaded = [body["kwargs"].get("path") for path, body, _ in server.seen if path == "/collective_rpc"]
    assert loaded == [None, "/cache/snapshots/abc", str(model)]


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_vllm_with_the_extension_of_another_release_is_named(connect, server, monkeypatch):
    monkeypatch.setattr(server, "rpc", lambda body, _: {"results": [{"can_load": True}]})
    with pytest.raises(ValueError, match="need its model: install the moe-rollout of this client there"):
        connect()


def test_vllm_in_process_says_what_it_made_of_a_hub_id(hub_model, monkeypatch):
    monkeypatch.setattr("rollout.vllm_in_process.require_vllm", lambda: None)
    adapter = VllmInProcess(hub_model, {})
    config = SimpleNamespace(model="/cache/snapshots/abc")
    adapter._engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
    assert adapter.own_weights == "/cache/snapshots/abc"


def test_names_of_checkpoint_files_and_of_the_state_dict_are_both_taken(hub_model, model, tmp_path):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    check_checkpoint(model, hub_model, state_dicts=False)
    loaded.save_pretrained(tmp_path / "fused", save_original_format=False)
    check_checkpoint(tmp_path / "fused", hub_model, state_dicts=False)
    with pytest.raises(ValueError, match=r"mlp.experts.7.down_proj.weight is None, need \(\d+, \d+\)"):
        check_checkpoint(without(model, "experts.7.down_proj", tmp_path / "less"), hub_model, state_dicts=False)


def without(model: Path, part: str, folder: Path) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    with safe_open(model / "model.safetensors", "pt") as file:
        save_file({n: file.get_tensor(n) for n in file.keys() if part not in n}, folder / "model.safetensors")  # noqa: SIM118
    return folder


class Worker(LoadExtension):
    """One of vLLM's that was started with a hub id, whose files lie in `cache`."""

    def __init__(self, cache: Path) -> None:
        model = SimpleNamespace(model=HUB_ID, revision=None)
        self.vllm_config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(download_dir=str(cache)))
        self.loaded: list[str] = []

    def load_tensors(self, tensors) -> None:
        self.loaded = [name for name, _ in tensors]


def test_vllms_worker_finds_the_files_of_its_hub_id(model, tmp_path):
    repository = tmp_path / f"models--{HUB_ID.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / "abc").symlink_to(model)
    worker = Worker(tmp_path)
    assert worker.can_load() == {"model": HUB_ID}
    assert worker.load_checkpoint(HUB_ID) == {"files": 1}
    assert "model.norm.weight" in worker.loaded
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors in another/model"):
        worker.load_checkpoint("another/model")


def test_a_state_dict_reaches_vllms_workers_in_other_processes_through_files(model):
    """As with tensor_parallel_size=2: that executor has no worker in this process."""
    loaded: dict = {}

    def rpc(method: str, kwargs: dict[str, str]) -> None:
        assert method == "load_checkpoint"
        with safe_open(Path(kwargs["path"]) / "model.safetensors", "pt") as file:
            loaded.update({name: file.get_tensor(name) for name in file.keys()}, folder=Path(kwargs["path"]))  # noqa: SIM118

    source = AutoModelForCausalLM.from_pretrained(model).state_dict()
    load(SimpleNamespace(model_executor=object(), collective_rpc=rpc), source, describe_model(str(model)))
    fused = source["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(loaded["model.layers.1.mlp.experts.7.down_proj.weight"], fused[7])
    assert not loaded["folder"].exists()
