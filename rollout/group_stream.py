"""The traces of one call to a group of ranks, which any thread may end."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import pyarrow as pa

from rollout.backend import SampleRequest
from rollout.rank_messages import Ended
from rollout.start import untouched
from storage.schema import from_table, to_table
from storage.trace import RoutingSpec, Trace


@dataclass(frozen=True)
class FinishedTable:
    """Finished traces as a rank sent them."""

    arrow: pa.Table
    ref: None = None

    def table(self) -> pa.Table:
        """The traces in the dataset's schema."""
        return self.arrow

    def traces(self) -> list[Trace]:
        """The traces, always the same objects."""
        return self._traces

    @cached_property
    def _traces(self) -> list[Trace]:
        return from_table(self.arrow)


class Submitter(Protocol):
    """The group as its streams see it."""

    @property
    def window(self) -> int:
        """Requests that a stream keeps submitted."""

    def submit(self, requests: Sequence[SampleRequest], stream: GroupStream) -> list[int]:
        """Give requests to ranks; each comes back through `stream.put` with its number, once."""

    def end(self, numbers: list[int]) -> None:
        """Abort these requests."""


class GroupStream(Iterator[FinishedTable]):
    """The traces of one `GroupBackend.stream` call, each once.

    At most `window` requests are submitted and not yet taken. `close` is for the thread that iterates, the others for
    any.
    """

    def __init__(self, backend: Submitter, requests: Sequence[SampleRequest], spec: RoutingSpec) -> None:
        self._backend = backend
        self._spec = spec
        self._pending = deque(requests)
        self._ended: queue.SimpleQueue[Ended | BaseException] = queue.SimpleQueue()
        self._open: dict[int, str] = {}
        self._unwanted: set[str] = set()
        self._outstanding = {request.sample_id for request in requests}
        self._aborted = False

    def __next__(self) -> FinishedTable:
        if self._pending and (self._aborted or self._pending[0].sample_id in self._unwanted):
            request = self._pending.popleft()
            self._outstanding.discard(request.sample_id)
            return FinishedTable(to_table([untouched(request)], self._spec))
        self._submit()
        if not self._open:
            raise StopIteration
        ended = self._ended.get()
        if isinstance(ended, BaseException):
            self._drop()
            raise ended
        self._outstanding.discard(self._open.pop(ended.ticket))
        if ended.table is None:
            self.close()
            raise ended.error or RuntimeError("a request ended without a trace")
        return FinishedTable(ended.table)

    def put(self, ended: Ended | BaseException) -> None:
        """A request of this stream has ended, or all have failed."""
        self._ended.put(ended)

    def outstanding(self) -> set[str]:
        """Samples whose traces were not taken yet."""
        return set(self._outstanding)

    def discard(self, sample_ids: set[str]) -> None:
        """End these samples: where they run, or as soon as it is their turn."""
        self._unwanted |= sample_ids
        self._backend.end([number for number, name in list(self._open.items()) if name in sample_ids])

    def abort(self) -> None:
        """End all requests now, from any thread: the iterator yields the rest with finish_reason "abort"."""
        self._aborted = True
        self._backend.end(list(self._open))

    def close(self) -> None:
        """Abort the rest and end the iteration."""
        numbers = list(self._open)
        self._drop()
        self._backend.end(numbers)

    def _drop(self) -> None:
        self._pending.clear()
        self._outstanding.clear()
        self._open = {}

    def _submit(self) -> None:
        window = self._backend.window
        count = min(len(self._pending), window - len(self._open))
        if count > window // 2 or (count and not self._open):
            requests = [self._pending.popleft() for _ in range(count)]
            numbers = self._backend.submit(requests, self)
            self._open.update(zip(numbers, (request.sample_id for request in requests), strict=True))
            unwanted = {request.sample_id for request in requests if self._aborted} | self._unwanted
            self._backend.end([number for number, name in self._open.items() if name in unwanted])
