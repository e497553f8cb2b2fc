"""A Backend over an engine that is not ours: requests, aborts, pauses. How it is spoken to is an adapter's; its weights
and its life are engine_life.py's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast, get_args

from rollout.backend import ModelInfo, PauseMode, SampleRequest, known_samples
from rollout.engine_adapter import EngineAdapter, new_request_id
from rollout.engine_life import EngineLife
from rollout.engine_reply import EngineDeadError, EngineError, failed_trace, trace_of
from rollout.figures import Figures
from rollout.loop_thread import LoopThread
from rollout.served_stream import Outbox, ServedStream, account_for
from rollout.served_weights import check_checkpoint
from rollout.update_modes import InFlight, KVMode, UpdatesByHalves, check_version
from storage.trace import Trace

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 0.1
"""After which an abort that found nothing is said again."""

Retractions: TypeAlias = Literal["refuse", "invalidate"]


class ServedBackend(UpdatesByHalves):
    """Implements `rollout.backend.Backend` over an adapter, on an event loop in a thread of its own.

    Args:
        max_running_requests: requests sent and not answered yet, over all streams; the rest waits here.
        retractions: a sequence that the engine evicted and recomputed is an error ("refuse"), or loses its routes
            ("invalidate").

    Raises:
        EngineError, ValueError: the engine cannot be used; the message says what to start it with.
    """

    has_refs = False

    def __init__(
        self, adapter: EngineAdapter, *, max_running_requests: int = 512, retractions: Retractions = "refuse"
    ) -> None:
        if retractions not in get_args(Retractions):
            raise ValueError(f"retractions is {retractions!r}, need 'refuse' or 'invalidate'")
        self._adapter, self._retractions, self.window = adapter, retractions, max_running_requests
        self._life = EngineLife(adapter)
        self._closed = False
        self._running: dict[str, SampleRequest] = {}
        self._ended = self._sampled = self._missing_rows = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Future[None]] = set()
        self._loop = LoopThread("moe-rollout-served")
        try:
            self._loop.call(self._open())
        except BaseException:
            self.close()
            raise

    async def _open(self) -> None:
        self._slots = asyncio.Semaphore(self.window)
        self._gate, self._idle = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._idle.set()
        await self._life.open()

    @property
    def info(self) -> ModelInfo:
        """Facts of the served model."""
        able = replace(self._adapter.capabilities, inplace_update=self._life.refused is None)
        return self._adapter.model.info(self._adapter.max_sequence_tokens, able)

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample now."""
        return self._life.version

    def figures(self) -> Figures:
        """See `Backend.figures`: what can be seen from here. An engine's own metrics know more."""
        running = len(self._running)
        return {
            "engines": 1,
            "requests_waiting": len(self._tasks) - running,
            "requests_running": running,
            "requests_ended_total": self._ended,
            "tokens_sampled_total": self._sampled,
            "missing_route_rows_total": self._missing_rows,
            "weight_version": self._life.version,
        }

    @property
    def progress(self) -> int | None:
        """Grows while the engine computes; None while it is started or takes weights, which may take long, and of a
        running server, whose answers have a time limit (`timeout`)."""
        return self._adapter.progress if self._life.serving else None

    def stream(self, requests: Sequence[SampleRequest]) -> ServedStream:
        """Each request's trace once, as they finish. A request that fails is a trace with its error; others go on.

        Raises:
            EngineDeadError: the engine is dead, and could not be started again or has not returned.
        """
        self._check_open()
        if any(request.start is not None for request in requests):
            raise ValueError(f"{self.info.not_forced}: it cannot continue recorded traces")
        try:
            noted = self._loop.call(self._life.check())
        except CancelledError:
            self._check_open()
            raise
        return ServedStream(self, self.info.spec, requests, noted)

    def start(self, request: SampleRequest, outbox: Outbox) -> Future[None]:
        """Begin one request; its trace arrives in `outbox`, also when the handle is cancelled."""
        handle = self._loop.submit(self._sample(request, outbox))
        handle.add_done_callback(lambda ended: account_for(ended, request, outbox))
        return handle

    def settle(self, noted: int) -> None:
        """See `EngineLife.settle`; nothing when this is closed: what ran was aborted, whoever closed it knows."""
        self._unless_closed(lambda: self._life.settle(noted))

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """End samples that wait or run; they come back with finish_reason "abort".

        Raises:
            ValueError: one of them is not known, or has ended; nothing is aborted.
        """
        self._loop.call(self._abort(sample_ids))

    async def _abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        named = known_samples(sample_ids, set(self._tasks))
        running = {request.sample_id: request_id for request_id, request in self._running.items()}
        for sample_id in named - running.keys():
            self._tasks[sample_id].cancel()
        await self._end_running([running[name] for name in named & running.keys()])

    async def _end_running(self, request_ids: Sequence[str]) -> None:
        """Abort them, again and again until their answers are here: one still on its way to the engine is not known
        there yet."""
        await asyncio.gather(*map(self._adapter.abort, request_ids))
        self._ending.add(again := asyncio.ensure_future(self._insist(set(request_ids))))
        again.add_done_callback(self._ending.discard)

    async def _insist(self, request_ids: set[str]) -> None:
        pause = AGAIN_SECONDS
        while left := request_ids & self._running.keys():
            await asyncio.sleep(pause)
            try:
                await asyncio.gather(*map(self._adapter.abort, left & self._running.keys()))
            except EngineError as error:  # what is wrong with the engine, the answers of these requests say
                logger.warning("an abort failed: %s", error)
            pause = min(2 * pause, 32 * AGAIN_SECONDS)

    def end(self, requests: Sequence[SampleRequest]) -> None:
        """`abort` for those of the requests that have not ended; `close` has ended all."""
        self._unless_closed(lambda: self._end({request.sample_id for request in requests}))

    async def _end(self, sample_ids: set[str]) -> None:
        await self._abort(sorted(sample_ids & self._tasks.keys()))

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sending requests, and return when none is running; `resume` sends those that came meanwhile.

        Raises:
            ValueError: mode "keep" or "yield", which would need a hold on the engine's own state.
        """
        if mode not in ("wait", "abort"):
            raise ValueError(f"pause mode {mode!r}: {self._adapter.capabilities.engine} takes 'wait' or 'abort'")
        self._loop.call(self._pause(mode))

    async def _pause(self, mode: str) -> None:
        self._gate.clear()
        if mode == "abort":
            await self._end_running(list(self._running))
        await self._idle.wait()

    def resume(self) -> None:
        """Go on."""
        self._loop.soon(self._gate.set)

    async def _sample(self, request: SampleRequest, outbox: Outbox) -> None:
        request_id = new_request_id()
        if self._closed:  # behind the cancellations of `_shut`, and before the end of the loop
            outbox.put(failed_trace(request, "abort", None))
            return
        if request.sample_id in self._tasks:
            raise ValueError("a sample of this id is under way")
        self._tasks[request.sample_id] = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            async with self._slots:
                await self._may_begin()
                trace = await self._ask(request, request_id)
        except asyncio.CancelledError:
            trace = failed_trace(request, "abort", None)
        except (EngineError, ValueError) as error:
            text = str(error)
            named = text if request.sample_id in text else f"trace {request.sample_id!r}: {text}"
            trace = failed_trace(request, "error", named)
        finally:
            del self._tasks[request.sample_id]
            self._ended += 1
        outbox.put(trace)

    async def _may_begin(self) -> None:
        """Return when the gate is open and the engine alive, both at once: an update may come while it is started."""
        while True:
            await self._gate.wait()
            await self._life.ready()
            if self._gate.is_set():
                return

    async def _ask(self, request: SampleRequest, request_id: str) -> Trace:
        self._running[request_id] = request
        self._idle.clear()
        version, begun = self._life.version, time.perf_counter()
        try:
            reply = await self._adapter.generate(request, request_id)
        except asyncio.CancelledError:
            await self._adapter.abort(request_id)
            raise
        except EngineDeadError as error:
            self._life.died(str(error))
            raise
        finally:
            del self._running[request_id]
            if not self._running:
                self._idle.set()
        trace = trace_of(request, reply, self._adapter.model, version, self._retractions)
        trace.seconds = time.perf_counter() - begun
        recorded = trace.route_len if trace.route_valid is None else int(trace.route_valid.sum())
        self._sampled += len(trace.completion_ids)
        self._missing_rows += trace.num_rows - recorded
        return trace

    def sleep(self, level: int = 1, *, in_flight: Literal["wait", "abort"] = "wait") -> None:
        """Not offered.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self._adapter.capabilities.engine} cannot sleep through this client; use its own interface")

    def wake(self, source: Any = None, version: int | None = None, **_: Any) -> None:
        """Not offered, see `sleep`."""
        raise ValueError(f"{self._adapter.capabilities.engine} cannot sleep through this client; use its own interface")

    @contextlib.contextmanager
    def prepare_update(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False
    ) -> Iterator[Callable[[InFlight, KVMode], None]]:
        """See `RolloutClient.update_weights`: checked here, loaded by calling what this gives.

        The first update is a rehearsal: the current weights are loaded again and must give the same greedy tokens and
        routes, with nothing beside them: what runs ends first, that once also with "keep". After an update that failed
        the engine counts as dead.

        Args:
            source: a checkpoint directory, visible here and to the engine, or, in process, a state dict.

        Raises:
            ValueError, FileNotFoundError: version, names, shapes or dtypes do not fit, or the engine cannot do what is
                asked; nothing was changed.
            EngineDeadError: loading failed, or the engine does not survive loading its own weights.
        """
        self._check_open()
        if not self.info.capabilities.inplace_update:
            raise ValueError(f"{self.info.capabilities.engine} takes no weights in place: {self._life.refused}")
        check_version(version, self._life.version, force)
        dicts = self._adapter.takes_state_dicts
        check_checkpoint(source, self._adapter.model, state_dicts=dicts, check_finite=check_finite)
        yield lambda in_flight, kv: self._apply(source, version, in_flight, kv)

    def _apply(self, source: Any, version: int, in_flight: InFlight, kv: KVMode) -> None:
        self._adapter.capabilities.check_update(in_flight, kv)
        self._loop.call(self._update(source, version, in_flight))

    async def _update(self, source: Any, version: int, in_flight: str) -> None:
        was_open = self._gate.is_set()
        if in_flight != "keep":
            await self._pause(in_flight)
        elif not self._life.rehearsed:
            await self._pause("wait")
        try:
            await self._life.update(source, version, running=in_flight == "keep")
        finally:
            if was_open:
                self._gate.set()

    def close(self) -> None:
        """Abort what runs and release the engine."""
        if self._closed:
            return
        self._closed = True
        self._loop.call(self._shut())
        self._loop.stop()

    async def _shut(self) -> None:
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._life.close()

    def _unless_closed(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do it; when this is closed, or gets closed meanwhile, return."""
        if self._closed:
            return
        try:
            self._loop.call(work())
        except CancelledError:
            if not self._closed:
                raise

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed")
