"""A Backend over an engine that is not ours: requests, aborts, weight updates. How it is spoken to is an adapter's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

from rollout.backend import ModelInfo, PauseMode, SampleRequest, known_samples
from rollout.canary import difference, sing
from rollout.capabilities import Capabilities
from rollout.engine_model import EngineModel
from rollout.engine_reply import EngineDeadError, EngineError, EngineReply, failed_trace, trace_of
from rollout.figures import Figures
from rollout.finished_trace import FinishedTrace
from rollout.served_weights import check_checkpoint
from rollout.update_modes import InFlight, KVMode
from storage.trace import Trace

logger = logging.getLogger(__name__)
T = TypeVar("T")
Retractions: TypeAlias = Literal["refuse", "invalidate"]


class EngineAdapter(Protocol):
    """One way to speak to one engine. All methods run on one event loop.

    `in_process` adapters take state dicts, the others directories that the server reads.
    """

    model: EngineModel
    in_process: bool

    @property
    def capabilities(self) -> Capabilities:
        """Known once `open` has returned."""

    @property
    def max_sequence_tokens(self) -> int:
        """The engine's own bound of prompt + completion."""

    async def open(self) -> int:
        """Connect or start, check what can be checked; the current weight version."""

    async def generate(self, request: SampleRequest, request_id: str) -> EngineReply:
        """Sample one sequence."""

    async def abort(self, request_id: str) -> None:
        """End it early: `generate` then returns what there is."""

    async def load_weights(self, source: Any, version: int) -> None:
        """Load, drop every cached key and value, set the version. Nothing is running. An error means: not usable."""

    async def close(self) -> None:
        """Release it."""


class ServedBackend:
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
        self._adapter, self._retractions, self.window = adapter, retractions, max_running_requests
        self._weights: Any = adapter.model.path
        self._dead: str | None = None
        self._canary_passed = False
        self._closed = False
        self._running: dict[str, SampleRequest] = {}
        self._ended = self._sampled = self._missing_rows = 0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moe-rollout-served", daemon=True)
        self._thread.start()
        try:
            self._version = self._call(self._open())
        except BaseException:
            self.close()
            raise

    async def _open(self) -> int:
        self._slots = asyncio.Semaphore(self.window)
        self._gate, self._idle = asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._idle.set()
        return await self._adapter.open()

    @property
    def info(self) -> ModelInfo:
        """Facts of the served model."""
        model, limit = self._adapter.model, self._adapter.max_sequence_tokens
        return ModelInfo(
            spec=model.spec,
            vocab_size=model.vocab_size,
            max_sequence_tokens=min(limit, model.max_positions),
            max_sequence_reason="the engine's limit" if limit < model.max_positions else "the model's positions",
            tokenizer_path=model.path if model.has_tokenizer else None,
            captures_routes=True,
            not_forced=f"{self._adapter.capabilities.engine} cannot be told which routes to take",
            capabilities=self._adapter.capabilities,
        )

    @property
    def weight_version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

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
            "weight_version": self._version,
        }

    def stream(self, requests: Sequence[SampleRequest]) -> ServedStream:
        """Each request's trace once, as they finish. A request that fails is a trace with its error; others go on."""
        self._check_alive()
        if any(request.start is not None for request in requests):
            raise ValueError(f"{self.info.not_forced}: it cannot continue recorded traces")
        return ServedStream(self, requests)

    def start(self, request: SampleRequest, outbox: queue.SimpleQueue[Trace]) -> Future[None]:
        """Begin one request; its trace arrives in `outbox`, also when the handle is cancelled."""
        handle = asyncio.run_coroutine_threadsafe(self._sample(request, outbox), self._loop)
        handle.add_done_callback(lambda h: outbox.put(failed_trace(request, "abort", None)) if h.cancelled() else None)
        return handle

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """End samples that wait or run; they come back with finish_reason "abort".

        Raises:
            ValueError: one of them is not known, or has ended; nothing is aborted.
        """
        self._call(self._abort(sample_ids))

    async def _abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        named = known_samples(sample_ids, set(self._tasks))
        running = {request.sample_id: request_id for request_id, request in self._running.items()}
        for sample_id in named - running.keys():
            self._tasks[sample_id].cancel()
        await asyncio.gather(*(self._adapter.abort(running[name]) for name in named & running.keys()))

    def end(self, requests: Sequence[SampleRequest]) -> None:
        """`abort` for those of the requests that have not ended."""
        self._call(self._end({request.sample_id for request in requests}))

    async def _end(self, sample_ids: set[str]) -> None:
        await self._abort(sorted(sample_ids & self._tasks.keys()))

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sending requests, and return when none is running; `resume` sends those that came meanwhile.

        Raises:
            ValueError: mode "keep" or "yield", which would need a hold on the engine's own state.
        """
        if mode not in ("wait", "abort"):
            raise ValueError(f"pause mode {mode!r}: {self._adapter.capabilities.engine} takes 'wait' or 'abort'")
        self._call(self._pause(mode))

    async def _pause(self, mode: str) -> None:
        self._gate.clear()
        if mode == "abort":
            await asyncio.gather(*map(self._adapter.abort, list(self._running)))
        await self._idle.wait()

    def resume(self) -> None:
        """Go on."""
        self._loop.call_soon_threadsafe(self._gate.set)

    async def _sample(self, request: SampleRequest, outbox: queue.SimpleQueue[Trace]) -> None:
        request_id = new_request_id()
        self._tasks[request.sample_id] = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            async with self._slots:
                await self._gate.wait()
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

    async def _ask(self, request: SampleRequest, request_id: str) -> Trace:
        self._check_alive()
        self._running[request_id] = request
        self._idle.clear()
        version = self._version
        try:
            reply = await self._adapter.generate(request, request_id)
        except asyncio.CancelledError:
            await self._adapter.abort(request_id)
            raise
        finally:
            del self._running[request_id]
            if not self._running:
                self._idle.set()
        trace = trace_of(request, reply, self._adapter.model, version, self._retractions)
        recorded = trace.route_len if trace.route_valid is None else int(trace.route_valid.sum())
        self._sampled += len(trace.completion_ids)
        self._missing_rows += trace.num_rows - recorded
        return trace

    @contextlib.contextmanager
    def prepare_update(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False
    ) -> Iterator[Callable[[InFlight, KVMode], None]]:
        """See `Backend.prepare_update`; here all is checked by the second half."""
        others = {"force": force, "check_finite": check_finite}
        yield lambda in_flight, kv: self.update_weights(source, version, in_flight=in_flight, kv=kv, **others)

    def sleep(self, level: int = 1, *, in_flight: Literal["wait", "abort"] = "wait") -> None:
        """Not offered.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self._adapter.capabilities.engine} cannot sleep through this client; use its own interface")

    def wake(self, source: Any = None, version: int | None = None, **_: Any) -> None:
        """Not offered, see `sleep`."""
        raise ValueError(f"{self._adapter.capabilities.engine} cannot sleep through this client; use its own interface")

    def update_weights(self, source: Any, version: int, *, in_flight: InFlight = "wait", **others: Any) -> None:
        """Replace the weights between requests; what arrives meanwhile waits.

        The first update is a rehearsal: the current weights are loaded again and must give the same greedy tokens and
        routes. After an update that failed the engine counts as dead.

        Args:
            source: a checkpoint directory, visible here and to the engine, or, in process, a state dict.
            in_flight: let running requests finish, or abort them.

        Raises:
            ValueError: version, names, shapes or dtypes do not fit; nothing was changed.
            EngineDeadError: loading failed, or the engine does not survive loading its own weights.
        """
        if unknown := {name: value for name, value in others.items() if value not in (False, "keep", None)}:
            raise ValueError(f"{self.info.capabilities.engine} cannot do {unknown} in update_weights")
        if in_flight not in ("wait", "abort"):
            raise ValueError(
                f"in_flight={in_flight!r}: {self.info.capabilities.engine} has no version spans, use 'wait' or 'abort'"
            )
        self._check_alive()
        if type(version) is not int or version <= self._version:
            raise ValueError(f"weight version {version!r} is not an integer above the current {self._version}")
        check_checkpoint(source, self._adapter.model, in_process=self._adapter.in_process)
        self._call(self._update(source, version, in_flight))

    async def _update(self, source: Any, version: int, in_flight: str) -> None:
        was_open = self._gate.is_set()
        await self._pause(in_flight)
        try:
            try:
                await self._rehearse()
                await self._adapter.load_weights(source, version)
            except Exception as error:
                self._dead = f"its update to weight version {version} failed: {error}"
                raise EngineDeadError(f"{self._dead}; start the engine again") from error
            self._version, self._weights = version, source
        finally:
            if was_open:
                self._gate.set()

    async def _rehearse(self) -> None:
        if self._canary_passed:
            return
        vocab = self._adapter.model.vocab_size
        before = await sing(self._adapter.generate, vocab, new_request_id)
        await self._adapter.load_weights(self._weights, self._version)
        after = await sing(self._adapter.generate, vocab, new_request_id)
        if changed := difference(before, after):
            raise EngineError(
                f"loading its own weights again changed the model ({changed}): updates in place are refused"
            )
        self._canary_passed = True

    def close(self) -> None:
        """Abort what runs and release the engine."""
        if self._closed:
            return
        self._closed = True
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._adapter.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _check_alive(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed")
        if self._dead is not None:
            raise EngineDeadError(f"this engine is dead: {self._dead}; start it again")


def new_request_id() -> str:
    """Unique among a server's clients and of fixed width: SGLang aborts every id that begins with the given one."""
    return f"rx-{uuid.uuid4().hex}"


class ServedStream(Iterator[FinishedTrace]):
    """The traces of one `ServedBackend.stream` call; at most `window` are begun and not taken."""

    def __init__(self, backend: ServedBackend, requests: Sequence[SampleRequest]) -> None:
        self._backend, self._spec = backend, backend.info.spec
        self._pending = deque(requests)
        self._outbox: queue.SimpleQueue[Trace] = queue.SimpleQueue()
        self._begun: dict[str, tuple[SampleRequest, Any]] = {}
        self._aborted = threading.Event()

    def __next__(self) -> FinishedTrace:
        while self._pending and len(self._begun) < self._backend.window and not self._aborted.is_set():
            request = self._pending.popleft()
            self._begun[request.sample_id] = request, self._backend.start(request, self._outbox)
        if self._pending and self._aborted.is_set():
            return FinishedTrace(failed_trace(self._pending.popleft(), "abort", None), self._spec)
        if not self._begun:
            raise StopIteration
        trace = self._outbox.get()
        del self._begun[trace.sample_id]
        return FinishedTrace(trace, self._spec)

    def abort(self) -> None:
        """End all requests now, from any thread; the iterator yields the rest with finish_reason "abort"."""
        self._aborted.set()
        self._backend.end([request for request, _ in list(self._begun.values())])

    def close(self) -> None:
        """Drop the rest and end the iteration."""
        self._pending.clear()
        for _, handle in self._begun.values():
            handle.cancel()
        self._begun.clear()
