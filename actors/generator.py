"""The generator actor: an engine in its own process that answers with a stream of Arrow tables."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
import ray

from actors.metrics import Publisher
from actors.packing import pack
from actors.stored_weights import StoredWeights
from rollout.backend import Backend, ModelInfo, PauseMode, SampleRequest
from rollout.figures import Figures
from rollout.update_modes import InFlight, KVMode

logger = logging.getLogger(__name__)

CONCURRENT_STREAMS = 128
"""Calls of `stream` that one actor answers at once, each in a thread that mostly waits.

A call whose consumer pauses keeps its thread, and a stream of the pool holds up to `Limits.outstanding_chunks` (6)
calls per actor: 20 streams may pause before the next one has to wait.
"""


def local_backend(model: str, **engine_options: Any) -> Backend:
    """The default of `backend_factory`: the project's own engine, or the one that `backend=` names."""
    from rollout.engines import start_engine

    return start_engine(model, **engine_options)


def _nothing_staged(in_flight: InFlight, kv: KVMode) -> None:
    raise RuntimeError("apply_weights without stage_weights")


class Generator:
    """An engine that is loaded, asked and stopped by plain calls; `GeneratorActor` runs it in a Ray actor.

    >>> generator = Generator("rollout/tiny_moe", {"dtype": "float32"})
    >>> generator.load().spec.row_shape
    (8, 2)
    >>> sum(table.num_rows for table in generator.generate(requests)) == len(requests)
    True
    """

    def __init__(
        self,
        model: str,
        engine_options: dict[str, Any] | None = None,
        backend_factory: Callable[..., Backend] = local_backend,
    ) -> None:
        self._model = model
        self._engine_options = engine_options or {}
        self._backend_factory = backend_factory
        self._backend: Backend | None = None
        self._update = contextlib.ExitStack()
        self._apply: Callable[[InFlight, KVMode], None] = _nothing_staged

    @ray.method(concurrency_group="control")
    def load(
        self, weights: StoredWeights | None = None, version: int = 0, paused: bool = False, asleep: int = 0
    ) -> ModelInfo:
        """Load the model, then `weights` on top of it. Not part of `__init__`, so that errors keep their type.

        A pool that is paused takes a new actor `paused`, too, and one that sleeps one that sleeps at level `asleep`.
        """
        backend = self._backend_factory(self._model, **self._engine_options)
        if weights is not None:
            backend.update_weights(weights.tensors(), version, force=True)
        if paused:
            backend.pause()
        if asleep:
            backend.sleep(asleep)
        self._backend = backend
        self._opened(backend)
        return backend.info

    def _opened(self, backend: Backend) -> None:
        """For who runs this in an actor."""

    def _closing(self) -> None:
        """The same."""

    def generate(
        self, requests: Sequence[SampleRequest], stopped: Callable[[], bool] = lambda: False
    ) -> abc.Generator[pa.Table, None, None]:
        """Yield finished traces as tables; one closes after the trace that crosses 1 MiB, or when no other is finished.

        Closing the iterator, or `stopped()` becoming true, aborts the rest of the requests.
        """
        backend = self._loaded()
        return pack(backend.stream(requests), backend.info.spec, stopped=stopped)

    @ray.method(concurrency_group="control")
    def stage_weights(self, weights: StoredWeights, version: int, force: bool, check_finite: bool) -> None:
        """Check an update and hold it ready; the old weights go on serving. See `Backend.prepare_update`."""
        stack = contextlib.ExitStack()
        update = self._loaded().prepare_update(weights.tensors(), version, force=force, check_finite=check_finite)
        self._apply = stack.enter_context(update)
        self._update = stack

    @ray.method(concurrency_group="control")
    def apply_weights(self, in_flight: InFlight, kv: KVMode) -> None:
        """Carry out what was staged."""
        with self._update:
            self._apply(in_flight, kv)

    @ray.method(concurrency_group="control")
    def drop_weights(self) -> None:
        """Forget what was staged, if anything was."""
        self._update.close()

    @ray.method(concurrency_group="control")
    def sleep(self, level: int, in_flight: Literal["wait", "abort"]) -> None:
        """See `Backend.sleep`."""
        self._loaded().sleep(level, in_flight=in_flight)

    @ray.method(concurrency_group="control")
    def wake(self, weights: StoredWeights | None, version: int | None, force: bool, check_finite: bool) -> None:
        """See `Backend.wake`."""
        tensors = weights.tensors() if weights is not None else None
        self._loaded().wake(tensors, version, force=force, check_finite=check_finite)

    @ray.method(concurrency_group="control")
    def pause(self, mode: PauseMode = "keep") -> None:
        """See `Backend.pause`."""
        self._loaded().pause(mode)

    @ray.method(concurrency_group="control")
    def resume(self) -> None:
        """See `Backend.resume`."""
        self._loaded().resume()

    @ray.method(concurrency_group="control")
    def abort(self, sample_ids: Sequence[str]) -> None:
        """End those of the samples that wait or run here."""
        for sample_id in sample_ids:
            try:
                self._loaded().abort([sample_id])
            except ValueError as error:  # it has ended and its trace is on its way, or its call has not arrived yet
                logger.debug("%s", error)

    @ray.method(concurrency_group="control")
    def info(self) -> ModelInfo:
        """Facts of the loaded model; answers while sampling."""
        return self._loaded().info

    @ray.method(concurrency_group="control")
    def figures(self) -> Figures:
        """See `Backend.figures`; answers while sampling."""
        return self._loaded().figures()

    @ray.method(concurrency_group="control")
    def health(self) -> dict[str, Any]:
        """`{"pid": 4711, "loaded": True, "progress": 12345}`; answers while sampling.

        `progress` grows while the engine computes tokens; None when the backend does not count them.
        """
        progress = getattr(self._backend, "progress", None)
        return {"pid": os.getpid(), "loaded": self._backend is not None, "progress": progress}

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """Stop the engine; running streams end with finish_reason "abort"."""
        self._closing()
        if self._backend is not None:
            self._backend.close()

    def _loaded(self) -> Backend:
        if self._backend is None:
            raise RuntimeError(f"the generator of {self._model!r} has no model yet: call load() first")
        return self._backend


class _GeneratorActor(Generator):
    _publisher: Publisher | None = None

    def _opened(self, backend: Backend) -> None:
        """Tell Ray the engine's figures."""
        self._publisher = Publisher(backend.figures)

    def _closing(self) -> None:
        if self._publisher is not None:
            self._publisher.close()

    @ray.method(concurrency_group="generate")
    def stream(self, requests: Sequence[SampleRequest]) -> Iterator[pa.Table | list[str]]:
        """Yield each table of `generate` followed by its sample ids, so that the pool need not fetch the table."""
        stopped = ray.get_runtime_context().is_canceled
        with contextlib.closing(self.generate(requests, stopped)) as tables:
            for table in tables:
                yield table
                yield table["sample_id"].to_pylist()


_OPTIONS: dict[str, Any] = {
    "concurrency_groups": {"control": 4, "generate": CONCURRENT_STREAMS},
    "max_restarts": 0,
    "max_task_retries": 0,
}
GeneratorActor: Any = ray.remote(**_OPTIONS)(_GeneratorActor)
"""`Generator` in an actor. Control calls answer while it samples.

Ray never restarts it by itself: it would come back with the checkpoint's weights and could sample with them before the
pool applied the current ones. Nor does Ray repeat a call, which would splice two different samplings. `ActorPool`
replaces a dead actor and resubmits what is missing.
"""
