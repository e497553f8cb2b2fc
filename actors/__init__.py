"""Rollouts over Ray: a pool of generator actors and a sink actor. Importing this loads neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines import check_engine_options
from storage.promises import Promises
from storage.trace import RoutingSpec, Trace

if TYPE_CHECKING:
    from actors.pool import ActorPool
    from actors.sink import RemoteRecorder

__all__ = ["connect", "fetch", "open_recorder"]


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
        ValueError: for unknown engine options, or what the cluster can never hold, before anything starts.
        Exception: what loading the model raised in an actor, in its own type and words.
    """
    check_engine_options(engine_options or {})
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


def fetch(refs: Sequence[Any], *, dp_rank: int, dp_size: int, sizes: Sequence[int] | None = None) -> list[Trace]:
    """The traces of one data-parallel rank, called in its trainer; other ranks' objects are never asked for.

    `refs` are all references of a step, the same list in the same order on every rank, as
    `client.stream(as_refs=True)` yields them. Each holds one Arrow table of one or more traces and goes to one rank
    as a whole, so ranks may get different numbers of traces. Data goes from the node that sampled it to the
    trainer's; a driver that hands `refs` on, inside a list, fetches nothing. The routes are read-only views of the
    object store.

    >>> traces = actors.fetch(refs, dp_rank=1, dp_size=2)  # in a trainer actor
    >>> batch = ReplayBatch.collate(traces, spec=spec)

    Args:
        sizes: tokens, bytes or traces of each table when they are known: ranks then get about the same sum
            (largest first, to the least loaded). Default: consecutive references, equally many or one more.

    Raises:
        ValueError: a rank that does not exist, fewer references than ranks, or sizes that do not fit them.
        TypeError: a reference holds no table.
        Exception: what the remote code raised instead of a table, in its own type and words.
    """
    from actors.trainer_side import fetch_rank

    return fetch_rank(refs, dp_rank=dp_rank, dp_size=dp_size, sizes=sizes)


def open_recorder(
    traces: str | Path,
    spec: RoutingSpec,
    promises: Promises | None = None,
    run: Mapping[str, Any] | None = None,
    num_sinks: int = 1,
) -> RemoteRecorder:
    """Open the dataset `traces` for writing by sink actors, on this node if it is local; `run` as in `TraceWriter`.

    >>> recorder = open_recorder("traces/", pool.info.spec)

    Raises:
        SpecMismatchError: when the dataset holds traces of another model.
        FormatVersionError: when another release wrote it.
    """
    from actors.remote import ensure_ray
    from actors.sink import RemoteRecorder

    ensure_ray()
    root = str(traces)
    where = root if "://" in root else Path(root).resolve()
    return RemoteRecorder(where, spec, promises=promises, run=run, num_sinks=num_sinks)
