"""The traces of one call to a local engine, which any thread may end."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from rollout.backend import ModelInfo, SampleRequest
from rollout.request import Request
from storage.schema import to_table
from storage.trace import RoutingSpec, Trace


class Outbox(Protocol):
    """Where ended requests go."""

    def put(self, ended: Request | BaseException, /) -> None:
        """A request that has ended, or the error that ended all."""


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


class Submitter(Protocol):
    """The backend as its streams see it."""

    @property
    def info(self) -> ModelInfo:
        """Facts of the model."""

    @property
    def window(self) -> int:
        """Requests that a stream keeps submitted."""

    def submit(self, requests: Sequence[SampleRequest], outbox: Outbox, unwanted: set[str]) -> list[Request]:
        """Queue requests; the list fills as the engine takes them. The `unwanted` ones end at once."""

    def abort_requests(self, entries: list[Request]) -> None:
        """End them."""

    def trace(self, request: Request) -> Trace:
        """Of an ended request."""


class LocalStream(Iterator[LocalFinished]):
    """The traces of one `LocalBackend.stream` call.

    At most `window` requests are submitted and not yet taken, so a consumer that pauses holds a bounded number of
    results. `close` is for the thread that iterates, the others for any.
    """

    def __init__(self, backend: Submitter, requests: Sequence[SampleRequest]) -> None:
        self._backend = backend
        self._pending = deque(requests)
        self._outbox: queue.SimpleQueue[Request | BaseException] = queue.SimpleQueue()
        self._submitted: list[list[Request]] = []
        self._open = 0
        self._aborted = False
        self._outstanding = {request.sample_id for request in requests}
        self._unwanted: set[str] = set()

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
        self._outstanding.discard(ended.request.sample_id)
        return LocalFinished(self._backend.trace(ended), self._backend.info.spec)

    def _submit(self) -> None:
        window = self._backend.window
        count = min(len(self._pending), window - self._open)
        if count > window // 2 or (count and not self._open):
            requests = [self._pending.popleft() for _ in range(count)]
            entries = self._backend.submit(requests, self._outbox, self._unwanted)
            self._submitted.append(entries)
            self._open += count
            if self._aborted:
                self._backend.abort_requests(entries)

    def outstanding(self) -> set[str]:
        """Samples whose traces were not taken yet."""
        return set(self._outstanding)

    def discard(self, sample_ids: set[str]) -> None:
        """Samples that are to end as soon as they are submitted."""
        self._unwanted |= sample_ids

    def abort(self) -> None:
        """End all requests now, from any thread: the iterator yields the rest with finish_reason "abort"."""
        self._aborted = True
        for entries in list(self._submitted):
            self._backend.abort_requests(entries)

    def close(self) -> None:
        """Abort the rest and end the iteration."""
        self._pending.clear()
        self._outstanding.clear()
        if self._open:
            self.abort()
            self._open = 0
