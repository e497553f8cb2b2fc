"""Loggers for `on_stats=`: TensorBoard and Weights & Biases, imported when one is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from rollout.figures import Figures

PREFIX = "rollout/"


class TensorBoardLogger:
    """Writes every figure as a scalar at the step that ended. Needs `pip install 'moe-rollout[tensorboard]'`.

    >>> with TensorBoardLogger("runs/a") as log:
    ...     client = RolloutClient.local(model, traces="traces/", on_stats=log)

    Raises:
        ImportError: TensorBoard is not installed; the message says how to install it.
    """

    def __init__(self, log_dir: str | Path, prefix: str = PREFIX) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardLogger needs TensorBoard: pip install 'moe-rollout[tensorboard]'") from error
        self._writer: Any = SummaryWriter(str(log_dir))
        self._prefix = prefix

    def __call__(self, figures: Figures) -> None:
        """Write them; other scalars of the same step may be added by whoever trains."""
        for name, value in numbers(figures).items():
            self._writer.add_scalar(self._prefix + name, value, int(figures["last_step"]))
        self._writer.flush()

    def close(self) -> None:
        """End the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WandbLogger:
    """Logs every figure to a run of Weights & Biases. Needs `pip install 'moe-rollout[wandb]'`.

    Figures come with `rollout/last_step`, which W&B takes as their axis, so the trainer's own steps stay as they are.

    >>> log = WandbLogger(project="grpo", dir="runs")          # offline; `wandb sync runs/wandb/offline-*` uploads it
    >>> log = WandbLogger(run=wandb.run)                       # a run of the trainer's

    Args:
        run: one that is open, and stays open; otherwise `wandb.init(mode="offline", **init)` opens one.

    Raises:
        ImportError: wandb is not installed; the message says how to install it.
    """

    def __init__(self, run: Any = None, prefix: str = PREFIX, **init: Any) -> None:
        self._prefix, self._owned = prefix, run is None
        self._run = open_wandb(**init) if run is None else run
        self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}last_step")

    def __call__(self, figures: Figures) -> None:
        """Log them."""
        self._run.log({self._prefix + name: value for name, value in figures.items()})

    def close(self) -> None:
        """Finish the run, if it was opened here."""
        if self._owned:
            self._run.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_wandb(**init: Any) -> Any:
    """`wandb.init`, offline unless `mode=` says otherwise."""
    try:
        import wandb
    except ImportError as error:
        raise ImportError("WandbLogger needs wandb: pip install 'moe-rollout[wandb]'") from error
    return wandb.init(**{"mode": "offline", **init})


def numbers(figures: Figures) -> Figures:
    """All but the step, which is the axis."""
    return {name: value for name, value in figures.items() if name != "last_step"}
