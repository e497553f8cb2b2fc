"""What a client notes in the run.json of a dataset that it creates; storage/redact.py takes out what is secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.backend import Backend
from rollout.config import EngineOptions
from rollout.engines import OWN


def run_facts(
    backend: Backend,
    model: str | Path,
    run: str,
    engine: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Run, model with its fingerprint, engine options with their defaults, and what the caller adds.

    >>> run_facts(backend, "path/to/qwen3-moe", "run", {"dtype": "float32"})["engine"]["max_batch_tokens"]
    2048
    """
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"run_config is {config!r:.80}, need a mapping of names to JSON values")
    info = backend.info
    facts = {
        "run": run,
        "model": str(model),
        "model_fingerprint": info.fingerprint,
        "max_sequence_tokens": info.max_sequence_tokens,
        "engine": resolved(engine),
        **{name: value for name, value in others.items() if value is not None},
    }
    return facts if config is None else facts | {"config": dict(config)}


def resolved(engine: Mapping[str, Any]) -> dict[str, Any]:
    """All options of our own engine; those that were given of another."""
    name = engine.get("backend", OWN)
    given = {option: value for option, value in engine.items() if option != "backend"}
    return {"backend": name, **(EngineOptions(**given).model_dump(mode="json") if name == OWN else given)}
