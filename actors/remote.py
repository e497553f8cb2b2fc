"""What the pool and the sink need to know of Ray: which errors mean a dead process, how to get the original error."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

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


NO_CLUSTER = "Start Ray there (`ray start --head`), correct the address, or `unset RAY_ADDRESS` to use a local cluster"


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

    Raises:
        ConnectionError: nothing answers at RAY_ADDRESS; the message says what to do next.
    """
    if ray.is_initialized():
        return
    if not (address := os.environ.get("RAY_ADDRESS")):
        ray.init(address="local", include_dashboard=False)
        return
    check_answers(address)
    try:
        ray.init(address="auto")
    except ConnectionError as error:
        raise ConnectionError(f"RAY_ADDRESS is {address!r}: {first_line(error)}. {NO_CLUSTER}") from error


def check_answers(address: str, timeout_s: float = 5.0) -> None:
    """Whether something listens at `host:port`, or `ray://host:port`: Ray itself tries for minutes before it ends.

    Raises:
        ConnectionError: nothing does, or the address is no cluster's; the message says what to do next.
    """
    if "://" not in address and ":" not in address:  # "auto", "local"
        return
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.scheme not in ("", "ray"):
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}: that is the dashboard, which takes jobs (`ray job submit`); "
            "a program that samples needs host:6379, or no RAY_ADDRESS at all"
        )
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout_s).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"RAY_ADDRESS is {address!r}, and nothing answers there: {error}. {NO_CLUSTER}"
        ) from error


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
