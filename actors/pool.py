"""A pool of generator actors behind the same protocol as an engine in process."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import ray

from actors.all_or_none import Round
from actors.dispatch import Dispatch, Limits
from actors.finished import RemoteFinished
from actors.generator import GeneratorActor, local_backend
from actors.metrics import ResubmitMetrics, ask_figures
from actors.placement import Placement, place
from actors.remote import LOST, ensure_ray
from actors.slot import ActorSlot
from actors.stored_weights import StoredWeights
from actors.stream import PoolStream
from rollout.backend import Backend, ModelInfo, PauseMode, SampleRequest, check_pause_mode, known_samples
from rollout.figures import Figures
from rollout.update_modes import (
    WAITS_FOR_EVER,
    InFlight,
    KVMode,
    OneAtATime,
    UpdatesByHalves,
    check_sleep,
    check_version,
)

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
WARN_SECONDS = 30.0
CLOSE_SECONDS = 3.0
ARROW_POOL = "system"
"""Arrow's default, mimalloc, keeps about a table for each of the 128 threads that answer streams: 170 MiB per actor."""


class ActorPool(UpdatesByHalves):
    """Spreads requests over N generator actors by load; survives their death. Implements `rollout.backend.Backend`.

    >>> pool = ActorPool("rollout/tiny_moe", num_actors=2, engine_options={"dtype": "float32"})
    >>> sum(len(finished.sample_ids) for finished in pool.stream(requests)) == len(requests)
    True

    Args:
        model: local path or hub id; a local path must exist on every node.
        num_actors: engines, each with a model of its own.
        engine_options: passed to the backend. With `dp_size` above 1 an engine is a group of ranks, for which a Ray
            placement group reserves one node's resources, a bundle per rank.
        num_cpus, num_gpus, resources: Ray's, per actor, or per rank of a group.
        runtime_env: Ray's. Without `num_threads` in the engine options an actor computes with one thread.
        backend_factory: called as `backend_factory(model, **engine_options)` in the actor.
        limits: bounds of what is in flight; by default sized so that `max_running_requests` stay busy.

    Raises:
        ValueError: the cluster can never hold the actors; naming what is missing.
        RuntimeError: nothing was free for a group within `limits.placement_seconds`.
        Exception: what loading the model raised in an actor, in its own type and words.
    """

    has_refs = True

    def __init__(
        self,
        model: str | Path,
        *,
        num_actors: int = 1,
        engine_options: Mapping[str, Any] | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        backend_factory: Callable[..., Backend] = local_backend,
        limits: Limits | None = None,
    ) -> None:
        if num_actors < 1:
            raise ValueError(f"num_actors is {num_actors}, need at least 1")
        self._resources = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        engine_options = dict(engine_options or {})
        self._limits = limits or Limits.for_engine(engine_options)
        dp_size = int(engine_options.get("dp_size", 1))
        self._actor_options: dict[str, Any] = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": dict(resources or {}),
            "runtime_env": _environment(runtime_env or {}, engine_options),
        }
        self._actor_args = (absolute_if_local(model), engine_options, backend_factory)
        ensure_ray()
        self._weights: tuple[StoredWeights | None, int] = (None, 0)
        self._resubmits = ResubmitMetrics()
        self._turns = OneAtATime()
        self._asleep = 0
        self._dispatches: list[Dispatch] = []
        self._paused = False
        self._changed = threading.Condition()
        self._closed = threading.Event()
        attempts = self._limits.max_attempts
        places = place(num_actors, dp_size, self._resources, self._limits.placement_seconds)
        self._slots: list[ActorSlot] = []
        try:
            self._slots += [
                ActorSlot(index, self._start, attempts, placement) for index, placement in enumerate(places)
            ]
            self._info, *_ = [self._await_loaded(slot) for slot in self._slots]
        except BaseException:
            self.close()
            for placement in places[len(self._slots) :]:
                placement.remove()
            raise

    @property
    def info(self) -> ModelInfo:
        """Facts of the model the actors loaded."""
        return self._info

    def stream(self, requests: Sequence[SampleRequest]) -> PoolStream:
        """Each sample once, as they finish. Any thread may `close` or `abort` the stream.

        Raises:
            ValueError: two requests share a sample id.
            RuntimeError: the actors sleep; while iterating, actors keep dying over the same samples; naming one.
            Exception: while iterating, what an actor's engine raised, in its own type and words.
        """
        if self._asleep:
            raise RuntimeError("the actors sleep, their weights are not on the device: call wake() before sampling")
        dispatch = Dispatch(
            self._slots,
            requests,
            self._limits,
            self._info.spec,
            self._closed,
            paused=lambda: bool(self._asleep),
            resting=lambda: self._paused or bool(self._asleep),
            resubmitted=self._resubmits.add,
        )
        return PoolStream(dispatch, self._run(dispatch))

    def figures(self) -> Figures:
        """See `Backend.figures`: of the actors that answer in time. One that died took its totals along."""
        handles = [handle for slot in self._slots if (handle := slot.ready_handle()) is not None]
        return ask_figures(handles) | {"samples_resubmitted_total": self._resubmits.total}

    def _run(self, dispatch: Dispatch) -> Generator[RemoteFinished, None, None]:
        with self._changed:
            self._check_open()
            self._dispatches.append(dispatch)
        try:
            yield from dispatch.run()
        finally:
            with self._changed:
                self._dispatches.remove(dispatch)
                self._changed.notify_all()

    def pause(self, mode: PauseMode = "keep") -> None:
        """See `Backend.pause`; returns when all actors rest. One that dies meanwhile is replaced by a paused one."""
        check_pause_mode(mode)
        self._check_open()
        self._paused = True
        if mode == "abort":
            self.abort("all")
        self._ask_all(lambda handle: handle.pause.remote(mode))

    def resume(self) -> None:
        """Go on."""
        self._check_open()
        self._paused = False
        self._ask_all(lambda handle: handle.resume.remote())

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """See `Backend.abort`. The streams notice within `dispatch.POLL_SECONDS`, when they are read."""
        with self._changed:
            dispatches = list(self._dispatches)
        wanted = known_samples(sample_ids, {name for dispatch in dispatches for name in dispatch.missing()})
        for dispatch in dispatches:
            dispatch.discard(wanted)

    def _ask_all(self, ask: Callable[[Any], Any]) -> None:
        self._await_all()
        answers = Round(self._slots, ask)
        answers.replace_lost()
        if answers.refusal is not None and not isinstance(answers.refusal, LOST):
            raise answers.refusal

    @contextlib.contextmanager
    def prepare_update(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False
    ) -> Iterator[Callable[[InFlight, KVMode], None]]:
        """The two halves of an update, on all actors or on none; see `Backend.prepare_update`.

        The source is read here and stored once; a node gets one copy of it. It stays in the object store until the next
        update: an actor that dies is replaced by one that takes these weights before it samples.

        Raises:
            Exception: why an actor refused, in its own type and words; nothing was changed.
        """
        with self._turns.take(f"update_weights to version {version!r}"):
            if self._asleep:
                raise RuntimeError("update_weights while the actors sleep; call wake(weights, version)")
            stored = self._store(source, version, force)
            self._await_all()
            options = stored, version, force, check_finite
            staged = Round(self._slots, lambda handle: handle.stage_weights.remote(*options))
            try:
                if staged.refusal is not None:
                    raise staged.refusal
                yield lambda in_flight, kv: self._apply(staged, (stored, version), in_flight, kv)
            finally:
                Round(self._slots, lambda handle: handle.drop_weights.remote()).replace_lost()

    def _apply(self, staged: Round, weights: tuple[StoredWeights, int], in_flight: InFlight, kv: KVMode) -> None:
        """Actors that are begun from now on begin with the new weights, so none is left behind."""
        if in_flight == "wait" and self._paused:
            raise RuntimeError(WAITS_FOR_EVER)
        self._weights = weights
        applied = Round(self._slots, lambda handle: handle.apply_weights.remote(in_flight, kv))
        staged.replace_failed()
        applied.replace_failed()
        self._await_all()

    def sleep(self, level: int = 1, *, in_flight: Literal["wait", "abort"] = "wait") -> None:
        """See `RolloutClient.sleep`: all actors."""
        check_sleep(level, in_flight)
        with self._turns.take("sleep"):
            if self._asleep:
                raise RuntimeError("sleep while the actors sleep; call wake()")
            if in_flight == "wait" and self._paused:
                raise RuntimeError(WAITS_FOR_EVER)
            self._await_all()
            self._asleep = level
            Round(self._slots, lambda handle: handle.sleep.remote(level, in_flight)).replace_failed()

    def wake(
        self, source: Any = None, version: int | None = None, *, force: bool = False, check_finite: bool = False
    ) -> None:
        """See `RolloutClient.wake`: all actors. One that refuses where another woke is replaced by an awake one."""
        with self._turns.take("wake"):
            if not self._asleep:
                raise RuntimeError("wake() of actors that do not sleep")
            stored = None if source is None else self._store(source, version, force)
            self._await_all()
            woken = Round(self._slots, lambda handle: handle.wake.remote(stored, version, force, check_finite))
            if woken.refusal is not None and None not in woken.errors:
                raise woken.refusal
            self._asleep = 0
            if stored is not None and version is not None:
                self._weights = (stored, version)
            woken.replace_failed()

    def _store(self, source: Any, version: Any, force: bool) -> StoredWeights:
        from rollout.weights import named_tensors

        self._check_open()
        with contextlib.closing(named_tensors(source)) as named:
            check_version(version, self._weights[1], force)
            return StoredWeights.put(named)

    def close(self) -> None:
        """Stop the actors. Running streams end with finish_reason "abort"."""
        if self._closed.is_set() or not ray.is_initialized():
            return
        self._closed.set()
        closing = [slot.handle.close.remote() for slot in self._slots]
        ray.wait(closing, num_returns=len(closing), timeout=CLOSE_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: not self._dispatches, timeout=CLOSE_SECONDS)
        for slot in self._slots:
            slot.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("this ActorPool is closed; make a new one")

    def _start(self, placement: Placement) -> tuple[Any, Any]:
        """Begin an actor with the current weights: its handle and the reference of its `load`."""
        handle = GeneratorActor.options(**self._actor_options, **placement.begin()).remote(*self._actor_args)
        return handle, handle.load.remote(*self._weights, paused=self._paused, asleep=self._asleep)

    def _await_all(self) -> None:
        with self._changed:
            self._check_open()
        for slot in self._slots:
            self._await_loaded(slot)

    def _await_loaded(self, slot: ActorSlot) -> ModelInfo:
        begun = time.monotonic()
        while slot.ready_handle() is None:
            loading = slot.loading  # None when another thread saw it done in between
            waits = loading is not None and not ray.wait([loading], timeout=LOOK_SECONDS, fetch_local=False)[0]
            if waits and time.monotonic() - begun > WARN_SECONDS:
                begun = time.monotonic()
                free = ray.available_resources()
                logger.warning(
                    "generator actor %d waits for %s or still loads; the cluster has %s left, see `ray status`",
                    slot.index,
                    self._resources,
                    {name: free.get(name, 0.0) for name in self._resources},
                )
        return slot.info


def absolute_if_local(path: str | Path) -> str:
    """An existing local path made absolute, since actors have another working directory; anything else unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def _environment(runtime_env: Mapping[str, Any], engine_options: Mapping[str, Any]) -> dict[str, Any]:
    threads = str(engine_options.get("num_threads", 1))
    if threads == "auto":
        raise ValueError("num_threads='auto' measures one engine alone, and actors share a node's cores; give a number")
    ours = {"OMP_NUM_THREADS": threads, "ARROW_DEFAULT_MEMORY_POOL": ARROW_POOL}
    return {**runtime_env, "env_vars": {**ours, **runtime_env.get("env_vars", {})}}
