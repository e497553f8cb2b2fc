"""What the pool and the sink need to know of Ray: which errors mean a dead process, how to get the original error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

DEAD = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)
"""The process that ran the task is gone; Ray itself kills some when a node runs out of memory."""

LOST = (*DEAD, ObjectLostError)
"""That, or what it delivered went with its node or owner; the work may be given to another."""


def fetch(ref: Any) -> Any:
    """`ray.get(ref)`, raising what the remote code raised, in its own type and words."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from error


def first_line(error: BaseException) -> str:
    """An error as one line: `ActorDiedError: The actor died unexpectedly before finishing this task.`"""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def ensure_ray() -> None:
    """Connect to the cluster that RAY_ADDRESS names (a Ray job sets it), else start a local one; no-op when connected.

    The local cluster has no dashboard, which would listen on a port without authentication.
    """
    if ray.is_initialized():
        return
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto")
    else:
        ray.init(address="local", include_dashboard=False)


def check_resources(num_actors: int, resources: Mapping[str, float]) -> None:
    """Refuse at once what the cluster can never hold, instead of waiting for it without end.

    Raises:
        ValueError: naming the resource, what is asked and what the cluster has.
    """
    cluster = ray.cluster_resources()
    for name, each in resources.items():
        total = cluster.get(name, 0.0)
        if num_actors * each > total:
            raise ValueError(
                f"{num_actors} actors of {each:g} {name} need {num_actors * each:g}, the cluster has {total:g}; "
                "lower num_actors, or ask less per actor (num_cpus=0.5, say)"
            )
