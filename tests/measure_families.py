"""How each family is served, found by loading a tiny model: the table that `moe-rollout families` prints.

`python -m tests.measure_families > rollout/families.json` writes it for the installed transformers.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rollout import RouterReplay
from rollout.families import FamilyRow, declared_families
from rollout.local_backend import LocalBackend
from tests.families import NOT_BUILDABLE, save_tiny

# Why a family that builds is refused by the engine's self-test.
REFUSED = {"doge": "a token's experts depend on the tokens behind it (its scores are mixed across tokens)"}


def measure(model_type: str, directory: Path) -> FamilyRow:
    """Load a checkpoint into the engine, and into a trainer's replay, and say what happened."""
    try:
        backend = LocalBackend(str(directory))
    except ValueError as error:
        return FamilyRow(model_type, f"refused: {REFUSED.get(model_type, error)}", False, _replayable(directory))
    runner = backend._built.runner
    backend.close()
    served = "fast: latent" if runner.pool.latent else "fast: slot pool"
    if runner.own_caches is not None:
        served = "slow: own cache"
    elif runner.states is not None:
        served = "fast: states"
    return FamilyRow(model_type, served, backend.info.captures_routes, _replayable(directory))


def _replayable(directory: Path) -> bool:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    try:
        RouterReplay(model)
    except ValueError:
        return False
    return True


def measured_json() -> str:
    """The text of rollout/families.json for the installed transformers."""
    rows = []
    for name in declared_families():
        if name not in NOT_BUILDABLE:
            with tempfile.TemporaryDirectory() as directory:
                rows.append(measure(name, save_tiny(name, Path(directory)))._asdict())
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    version = importlib.metadata.version("transformers")
    return f'{{\n  "transformers": "{version}",\n  "families": [\n    {lines}\n  ]\n}}\n'


if __name__ == "__main__":
    sys.stdout.write(measured_json())
