"""The traces of one call to a served engine, as they finish."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from rollout.backend import SampleRequest
from rollout.engine_reply import failed_trace
from rollout.finished_trace import FinishedTrace
from storage.trace import RoutingSpec, Trace

Outbox = queue.SimpleQueue[Trace]


class Requests(Protocol):
    """What a stream needs of the backend that it belongs to."""

    window: int

    def start(self, request: SampleRequest, outbox: Outbox) -> Future[None]:
        """Begin one request; its trace arrives in `outbox`, also when the handle is cancelled."""

    def settle(self, noted: int) -> None:
        """Called behind the last trace; raises when traces may be of other weights than they say. See `EngineLife`."""

    def end(self, requests: Sequence[SampleRequest]) -> None:
        """Abort those of the requests that have not ended."""


class ServedStream(Iterator[FinishedTrace]):
    """The traces of one `ServedBackend.stream` call; at most `window` are begun and not taken."""

    def __init__(self, backend: Requests, spec: RoutingSpec, requests: Sequence[SampleRequest], noted: int) -> None:
        self._backend, self._spec, self._noted = backend, spec, noted
        self._pending = deque(requests)
        self._outbox: Outbox = queue.SimpleQueue()
        self._begun: dict[str, tuple[SampleRequest, Future[None]]] = {}
        self._aborted = threading.Event()
        self._settled = False

    def __next__(self) -> FinishedTrace:
        while self._pending and len(self._begun) < self._backend.window and not self._aborted.is_set():
            request = self._pending.popleft()
            self._begun[request.sample_id] = request, self._backend.start(request, self._outbox)
        if self._pending and self._aborted.is_set():
            return FinishedTrace(failed_trace(self._pending.popleft(), "abort", None), self._spec)
        if not self._begun:
            if not self._settled:
                self._settled = True
                self._backend.settle(self._noted)
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
        self._settled = True
        self._pending.clear()
        for _, handle in self._begun.values():
            handle.cancel()
        self._begun.clear()


def account_for(ended: Future[None], request: SampleRequest, outbox: Outbox) -> None:
    """The trace of a request whose task ended without one: its consumer waits for it."""
    if ended.cancelled():
        outbox.put(failed_trace(request, "abort", None))
    elif error := ended.exception():
        outbox.put(failed_trace(request, "error", f"{request.sample_id}: {type(error).__name__}: {error}"))
