"""What ranks compare before they load: every option, the config and so the routing spec, and the weights themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout import RolloutClient
from rollout.calibrate import plans_of
from rollout.config import EngineOptions
from rollout.group_start import check_member, facts
from rollout.lockstep import Membership
from rollout.parallel import CollectiveError
from rollout.tiny_moe import MODEL_PATH
from storage.sites import find_routers


def facts_of(path: Path, layout: str = "alltoall", **options: object) -> dict[str, str]:
    return facts(str(path), EngineOptions(**options), Membership(0, 2, layout, "file:///x"))  # type: ignore[arg-type]


def differing(path: Path, layout: str = "alltoall", **options: object) -> set[str]:
    """Names of what a rank that is started with these would say differently."""
    own, other = facts_of(Path(MODEL_PATH)), facts_of(path, layout, **options)
    return {name for name in own.keys() | other.keys() if own.get(name) != other.get(name)}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_PATH, tmp_path / "copy"))


def test_a_copy_elsewhere_is_the_same(copy: Path) -> None:
    assert differing(copy) == set()


def test_other_end_tokens_are_another_checkpoint(copy: Path) -> None:
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 7}))
    assert differing(copy) == {"checkpoint"}


@pytest.mark.parametrize("graphs", [(4, 65), (0, 4)])
def test_graph_batches_that_the_capture_buffer_does_not_hold_are_refused(graphs: tuple[int, ...]) -> None:
    member = Membership(0, 2, "allgather", "file:///x", graph_batches=graphs)
    with pytest.raises(ValueError, match=r"graph_batches are .*, need sizes from 1 to max_batch_tokens=64"):
        check_member(MODEL_PATH, EngineOptions(max_batch_tokens=64), member)
    check_member(
        MODEL_PATH, EngineOptions(max_batch_tokens=65), Membership(0, 2, "allgather", "file:///x", 60.0, (65,))
    )


def test_another_routing_spec_is_another_checkpoint(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    assert differing(copy) == {"checkpoint"}


def test_weights_of_another_training_step_are_another_checkpoint(copy: Path) -> None:
    """The files have the same names, sizes and headers."""
    (file,) = copy.glob("*.safetensors")
    size = file.stat().st_size
    stepped = {name: tensor + 1 / 8 for name, tensor in load_file(file).items()}
    save_file(stepped, file, metadata={"format": "pt"})
    assert file.stat().st_size == size
    assert differing(copy) == {"checkpoint"}


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"batch_invariant": True}, {"max_running_requests": 3}, {"collective_timeout_s": 5}],
)
def test_every_option_counts(options: dict) -> None:
    assert differing(Path(MODEL_PATH), **options) == set(options)
    assert facts_of(Path(MODEL_PATH)).keys() >= set(EngineOptions.model_fields)


def test_the_layout_counts() -> None:
    assert differing(Path(MODEL_PATH), "allgather") == {"layout"}


@pytest.mark.parametrize("alone", [True, False], ids=["a router that is tried alone", "within the model"])
def test_a_neighbour_that_is_lost_while_routers_are_tried_is_no_fault_of_the_model(monkeypatch, alone: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()
    routers = find_routers(model)

    def lost(*args: Any) -> None:
        calls.append(args)
        if not alone and len(calls) <= len(routers):
            raise TypeError("needs more than hidden states")
        raise CollectiveError("rank 0 of 2, step -1: a collective did not complete")

    calls: list[Any] = []
    monkeypatch.setattr(type(routers[0].module), "forward", lost)
    with pytest.raises(CollectiveError, match="did not complete"):
        plans_of(model, routers)


def test_code_of_a_checkpoint_is_refused_before_any_rank_is_started() -> None:
    with pytest.raises(ValueError, match=r"trust_remote_code=True with dp_size=2: .* use dp_size=1"):
        RolloutClient.local(MODEL_PATH, dp_size=2, trust_remote_code=True)
