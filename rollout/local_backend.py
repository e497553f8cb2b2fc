"""The engine in this process: one thread schedules, one runs the model, callers wait on queues."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from rollout.backend import ModelInfo, SampleRequest
from rollout.build import BuiltEngine, build_engine
from rollout.config import EngineOptions
from rollout.request import Request
from rollout.stops import PARTIAL, cut_at_stop
from storage.schema import to_table
from storage.trace import RoutingSpec, Trace

logger = logging.getLogger(__name__)
Outbox: TypeAlias = "queue.SimpleQueue[Request | BaseException]"


@dataclass(frozen=True)
class LocalFinished:
    """One finished trace in memory."""

    trace: Trace
    spec: RoutingSpec
    ref: None = None

    def traces(self) -> list[Trace]:
        """The trace."""
        return [self.trace]

    def table(self) -> pa.Table:
        """The trace as one row."""
        return to_table([self.trace], self.spec)


class LocalStream(Iterator[LocalFinished]):
    """The traces of one `LocalBackend.stream` call.

    At most `window` requests are submitted and not yet taken, so a consumer that pauses holds a bounded number of
    results. `close` is for the thread that iterates, `abort` for any other.
    """

    def __init__(self, backend: LocalBackend, requests: Sequence[SampleRequest]) -> None:
        self._backend = backend
        self._pending = deque(requests)
        self._outbox: Outbox = queue.SimpleQueue()
        self._submitted: list[list[Request]] = []
        self._open = 0
        self._aborted = False

    def __next__(self) -> LocalFinished:
        self._submit()
        if not self._open:
            raise StopIteration
        ended = self._outbox.get()
        if isinstance(ended, BaseException):
            self._open = 0
            self._pending.clear()
            raise ended
        self._open -= 1
        return LocalFinished(self._backend.trace(ended), self._backend.info.spec)

    def _submit(self) -> None:
        window = self._backend.window
        count = min(len(self._pending), window - self._open)
        if count > window // 2 or (count and not self._open):
            entries = self._backend.submit([self._pending.popleft() for _ in range(count)], self._outbox)
            self._submitted.append(entries)
            self._open += count
            if self._aborted:
                self._backend.abort(entries)

    def abort(self) -> None:
        """End all requests now, from any thread: the iterator yields the rest with finish_reason "abort"."""
        self._aborted = True
        for entries in list(self._submitted):
            self._backend.abort(entries)

    def close(self) -> None:
        """Abort the rest and end the iteration."""
        self._pending.clear()
        if self._open:
            self.abort()
            self._open = 0


class LocalBackend:
    """A Backend over one engine in this process.

    >>> backend = LocalBackend("path/to/qwen3-moe", dtype="float32")
    >>> next(backend.stream([SampleRequest("run/0/0-0/0", 0, (5, 7), SamplingParams(max_tokens=4, seed=0))])).traces()

    Raises:
        FileNotFoundError, ValueError: the model cannot be loaded, recorded or run exactly; see loader.py, self_test.py.
    """

    has_refs = False

    def __init__(self, model: str, **engine_options: Any) -> None:
        self.options = EngineOptions(**engine_options)
        self._built: BuiltEngine = build_engine(str(model), self.options, self._on_finish)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outboxes: dict[Request, Outbox] = {}
        self._dead: BaseException | None = None
        self._closed = False
        self._lock = threading.Lock()  # no command is queued behind the one that stops the engine
        self._thread = threading.Thread(target=self._run, name="moe-rollout-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that computes while the interpreter ends would abort the process

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._built.info

    @property
    def stats(self) -> Any:
        """The engine's counts and event log."""
        return self._built.engine.stats

    @cached_property
    def window(self) -> int:
        """How many requests one stream keeps submitted: a consumer that pauses holds at most this many results."""
        return 2 * self.options.max_running_requests

    def stream(self, requests: Sequence[SampleRequest]) -> LocalStream:
        """Each request's trace once, as they finish. Closing the stream aborts the rest."""
        return LocalStream(self, requests)

    def update_weights(self, source: Any, version: int) -> None:
        """Copy a state dict (names as in `model.state_dict()`) into the idle engine; rows from now on carry `version`.

        Raises:
            ValueError: a name, shape or dtype does not fit; nothing was changed.
            RuntimeError: requests are running.
        """
        self._call(lambda: self._built.update_weights(source, version))

    def close(self) -> None:
        """Abort what runs, stop both threads. Streams that wait get the aborted traces."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def submit(self, requests: Sequence[SampleRequest], outbox: Outbox) -> list[Request]:
        """Queue requests for the engine; each comes back through `outbox` when it has ended, or the error that ended
        the engine does. The list fills as the engine takes them.

        Raises:
            RuntimeError: this engine is closed.
        """
        entries: list[Request] = []

        def add() -> None:
            for request in requests:
                try:
                    entry = self._built.engine.new_request(request)
                except Exception as error:  # the call's, not the engine's
                    outbox.put(error)
                    return
                entries.append(entry)
                self._outboxes[entry] = outbox
                self._built.engine.add(entry)

        self._post(add)
        return entries

    def abort(self, entries: list[Request]) -> None:
        """End these requests now, from any thread; they come back with finish_reason "abort"."""
        self._put(lambda: self._built.engine.abort(entries))

    def _post(self, command: Callable[[], None]) -> None:
        if not self._put(command):
            raise RuntimeError("this engine is closed") from self._dead

    def _put(self, command: Callable[[], None]) -> bool:
        """Queue a command for the engine's thread; False when it has stopped."""
        with self._lock:
            running = self._dead is None and not self._closed
            if running:
                self._commands.put(command)
            return running

    def _call(self, command: Callable[[], None]) -> None:
        """Run a command on the engine's thread and wait for it."""
        answer: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def answered() -> None:
            try:
                command()
            except Exception as error:
                answer.put(error)
            else:
                answer.put(None)

        self._post(answered)
        error = answer.get()
        if error is not None:
            raise error

    def _on_finish(self, request: Request) -> None:
        self._outboxes.pop(request).put(request)

    def _run(self) -> None:
        try:
            while self._receive():
                if not self._built.engine.idle:
                    self._built.engine.step()
        except BaseException as error:
            logger.exception("the engine stopped")
            with self._lock:
                self._dead = error
            while not self._commands.empty():
                if (command := self._commands.get()) is not None:
                    command()  # so that whoever queued it is among those who are told
            for outbox in {id(box): box for box in self._outboxes.values()}.values():
                outbox.put(error)
        finally:
            self._built.close()

    def _receive(self) -> bool:
        """Run the commands that wait; block for one when idle. False to stop."""
        while True:
            try:
                command = self._commands.get(block=self._built.engine.idle)
            except queue.Empty:
                return True
            if command is None:
                self._built.engine.abort(list(self._outboxes))
                return False
            command()

    def trace(self, request: Request) -> Trace:
        """The trace of an ended request; its arrays are read-only, as they are over Ray."""
        params = request.request.sampling_params
        text = self._text_or_error(request)
        return Trace(
            sample_id=request.request.sample_id,
            step=request.request.step,
            prompt_ids=list(request.request.prompt_ids),
            completion_ids=request.output_ids,
            logprobs=_frozen(np.array(request.logprobs, np.float32)),
            raw_logprobs=_frozen(np.array(request.raw_logprobs, np.float32)),
            routed_experts=self._routes(request),
            finish_reason=request.finish_reason or "error",
            stop_reason=request.stop_reason,
            weight_version=request.weight_version,
            weight_versions=request.weight_spans(),
            seed=request.request.seed,
            sampling_params=params.model_dump(mode="json"),
            text=text,
            metadata=request.request.metadata,
            error=request.error,
            **(request.wanted.trace_fields(len(request.output_ids)) if request.wanted is not None else {}),
        )

    @staticmethod
    def _routes(request: Request) -> np.ndarray | None:
        """None when ended before the first token; a row behind the last delivered token is left out."""
        ended_early = request.finish_reason in ("abort", "error")
        if request.routes is None or (ended_early and not request.output_ids):
            return None
        limit = request.prompt_len + len(request.output_ids) - 1 if ended_early else None
        return _frozen(request.routes.take(limit))

    def _text_or_error(self, request: Request) -> str | None:
        try:
            return self._text(request)
        except Exception as error:  # a tokenizer that cannot decode what the model drew: this request's error alone
            request.finish_reason, request.error = "error", f"{type(error).__name__}: {error}"
            return None

    def _text(self, request: Request) -> str | None:
        tokenizer = self._built.tokenizer
        if tokenizer is None:
            return None
        text = tokenizer.decode(request.output_ids, skip_special_tokens=True)
        if not isinstance(request.stop_reason, str):
            return text
        before = tokenizer.decode(request.output_ids[:-1], skip_special_tokens=True)
        return cut_at_stop(text, request.stop_reason, len(before.rstrip(PARTIAL)))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
