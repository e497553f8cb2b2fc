"""Rollouts of MoE models with recorded, replayable routes. Names load lazily: parsing arguments needs no torch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036 (for who runs a clone: pip would have refused)
    raise ImportError(
        f"moe-rollout needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}; next: "
        "python3.11 -m venv .venv && . .venv/bin/activate && pip install ."
    )

if TYPE_CHECKING:
    from rollout.client import RolloutClient
    from rollout.replay import RouterReplay
    from rollout.sampling import SamplingParams

_HOME = {"RolloutClient": "client", "RouterReplay": "replay", "SamplingParams": "sampling"}
__all__ = ["RolloutClient", "RouterReplay", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rollout' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rollout.{_HOME[name]}"), name)
