"""Rollouts over Ray: a pool of generator actors and a sink actor. Importing this loads neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import EngineOptions
from storage.trace import RoutingSpec

if TYPE_CHECKING:
    from actors.pool import ActorPool
    from actors.sink import RemoteRecorder

__all__ = ["connect", "open_recorder"]


def connect(
    model: str | Path,
    *,
    num_actors: int = 1,
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    engine_options: Mapping[str, Any] | None = None,
) -> ActorPool:
    """Start `num_actors` engines on the Ray cluster (a local one when none is connected or named by RAY_ADDRESS).

    >>> pool = connect("rollout/tiny_moe", num_actors=2, engine_options={"dtype": "float32"})

    Raises:
        ValueError: for unknown engine options, before anything starts.
        Exception: what loading the model raised in an actor, in its own type and words.
    """
    EngineOptions(**(engine_options or {}))
    from actors.pool import ActorPool

    return ActorPool(
        model,
        num_actors=num_actors,
        engine_options=engine_options,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources=resources,
        runtime_env=runtime_env,
    )


def open_recorder(traces: str | Path, spec: RoutingSpec) -> RemoteRecorder:
    """Start the sink actor on this node and open the dataset `traces` for writing.

    >>> recorder = open_recorder("traces/", pool.info.spec)

    Raises:
        SpecMismatchError: when the dataset holds traces of another model.
        FormatVersionError: when another release wrote it.
    """
    from actors.remote import ensure_ray
    from actors.sink import RemoteRecorder

    ensure_ray()
    root = str(traces)
    return RemoteRecorder(root if "://" in root else Path(root).resolve(), spec)
