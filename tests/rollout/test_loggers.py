"""Loggers write what they are told: TensorBoard's file read back, W&B's calls on an object in its place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.loggers import TensorBoardLogger, WandbLogger

STEPS = [{"tokens_sampled_total": 30, "step_seconds_total": 0.5, "last_step": step} for step in (3, 4)]


def test_tensorboard_reads_back_the_scalars_at_their_steps(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with TensorBoardLogger(tmp_path) as log:
        for figures in STEPS:
            log(figures)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["rollout/step_seconds_total", "rollout/tokens_sampled_total"]
    assert [(e.step, e.value) for e in events.Scalars("rollout/tokens_sampled_total")] == [(3, 30), (4, 30)]


class FakeRun:
    """Keeps what a run of W&B is told."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.axis: tuple[str, str] | None = None
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axis = (name, step_metric)

    def log(self, data: dict[str, Any]) -> None:
        self.logged.append(data)

    def finish(self) -> None:
        self.finished = True


def test_wandb_opens_a_run_offline_and_finishes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = FakeRun(), []
    wandb = SimpleNamespace(init=lambda **options: asked.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with WandbLogger(project="grpo") as log:
        log(STEPS[0])
    assert asked == [{"mode": "offline", "project": "grpo"}]
    assert run.axis == ("rollout/*", "rollout/last_step")
    assert run.logged == [
        {"rollout/tokens_sampled_total": 30, "rollout/step_seconds_total": 0.5, "rollout/last_step": 3}
    ]
    assert run.finished


def test_a_run_of_the_trainer_stays_open() -> None:
    run = FakeRun()
    with WandbLogger(run=run) as log:
        log(STEPS[0])
    assert (len(run.logged), run.finished) == (1, False)


@pytest.mark.parametrize(
    ("make", "module", "command"),
    [
        (lambda: TensorBoardLogger("runs"), "torch.utils.tensorboard", "pip install 'moe-rollout[tensorboard]'"),
        (lambda: WandbLogger(), "wandb", "pip install 'moe-rollout[wandb]'"),
    ],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, make: Any, module: str, command: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as caught:
        make()
    assert command in str(caught.value)
