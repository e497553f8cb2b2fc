"""TRL's GRPOTrainer with recorded routes: every policy forward is replayed, whatever TRL does to the batch."""

import os

import pytest
import torch

pytest.importorskip("trl", reason="the TRL example needs the extra: pip install 'moe-rollout[trl]'")

from storage import TraceDataset
from tests.test_examples import load


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setitem(os.environ, "TRL_EXPERIMENTAL_SILENCE", "1")


def spied(example, monkeypatch):
    """The trainer's log-probabilities minus the sampler's, of every sampled token of every micro-batch."""
    seen = []
    compute = example.GRPOTrainer._get_per_token_logps_and_entropies

    def noting(self, *args, **kwargs):
        out = compute(self, *args, **kwargs)
        self.last_logps = out[0].detach()
        return out

    loss = example.ReplayTrainer._compute_loss

    def compared(self, model, inputs):
        out = loss(self, model, inputs)
        seen.append((self.last_logps - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()])
        return out

    monkeypatch.setattr(example.GRPOTrainer, "_get_per_token_logps_and_entropies", noting)
    monkeypatch.setattr(example.ReplayTrainer, "_compute_loss", compared)
    return seen


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.full)])
def test_shuffled_and_split_batches_find_their_routes(tmp_path, monkeypatch, checkpointing):
    """A float32 sampler: with each row's own routes trainer and sampler agree to rounding, at a learning rate of 0."""
    example = load("trl_grpo")
    seen = spied(example, monkeypatch)
    settings = {"per_device_train_batch_size": 16, "steps_per_generation": 2, "learning_rate": 0.0}
    settings["gradient_checkpointing"] = checkpointing
    trainer = example.main(4, str(tmp_path), "float32", **settings)
    assert len(seen) == 4
    assert max(float(part.abs().max()) for part in seen) < 1e-5
    assert trainer.replay.report().flipped_share == 0
    dataset = TraceDataset(tmp_path)
    assert dataset.verify() == []
    assert [len(list(dataset.iter(step=step))) for step in dataset.steps] == [32, 32]


@pytest.mark.full
def test_routes_of_other_samples_would_be_seen(tmp_path, monkeypatch):
    """The negative control: the same comparison, when the table gives each row its neighbour's routes."""
    example = load("trl_grpo")
    seen = spied(example, monkeypatch)
    find = example.RouteTable.rows

    def rolled(self, args, kwargs):
        rows = find(self, args, kwargs)
        return rows._replace(ids=rows.ids.roll(3, 0))

    monkeypatch.setattr(example.RouteTable, "rows", rolled)
    example.main(1, str(tmp_path), "float32", learning_rate=0.0, per_device_train_batch_size=32)
    assert max(float(part.abs().max()) for part in seen) > 1e-2


@pytest.mark.full
def test_a_reference_model_is_not_replayed(tmp_path):
    """With beta > 0 TRL forwards a reference model inside the same training step."""
    example = load("trl_grpo")
    trainer = example.main(2, None, beta=0.1, per_device_train_batch_size=16)
    assert trainer.ref_model is not None
    routers = [layer.mlp.gate for layer in trainer.ref_model.model.layers]
    assert all("forward" not in vars(router) for router in routers)
    assert torch.isfinite(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])).all()
