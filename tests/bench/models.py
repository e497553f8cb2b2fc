"""The models of `moe-rollout bench`, for the other benchmarks."""

from __future__ import annotations

from pathlib import Path

from rollout.bench_models import save_model

__all__ = ["make_small", "save_model"]


def make_small(directory: Path) -> str:
    """The small model, float32."""
    return save_model("small", directory)
