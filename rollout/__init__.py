"""Rollouts of MoE models with recorded, replayable routes. Names load lazily: parsing arguments needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
