"""One stream over the pool: chunks go out to the least loaded actor, tables come back as they finish."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.finished import RemoteFinished, aborted
from actors.remote import LOST, fetch, first_line
from actors.slot import ActorSlot
from actors.watchdog import Watchdog
from rollout.backend import SampleRequest
from rollout.config import EngineOptions
from storage.trace import RoutingSpec

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """Bounds of what is in flight.

    A chunk is a few prompts, asked of one actor in one call; `outstanding_chunks` calls at most run per actor and
    stream; each holds at most `tables_in_flight` tables that nobody took. `max_attempts` actors may die over one chunk.
    An actor that has work and computes no token for `stall_seconds` is killed and replaced. A group of ranks waits at
    most `placement_seconds` for a node that has room for all of them.
    """

    chunk_samples: int = 16
    outstanding_chunks: int = 6
    tables_in_flight: int = 4
    max_attempts: int = 3
    stall_seconds: float = 300.0
    placement_seconds: float = 120.0

    @classmethod
    def for_engine(cls, options: Mapping[str, Any]) -> Limits:
        """Half more samples outstanding per actor than all its ranks run at once, in chunks of a quarter."""
        default = EngineOptions.model_fields["max_running_requests"].default
        running = int(options.get("max_running_requests", default)) * int(options.get("dp_size", 1))
        return cls(chunk_samples=max(1, running // 4), outstanding_chunks=6)


@dataclass(frozen=True)
class _Chunk:
    requests: tuple[SampleRequest, ...]
    attempt: int = 1


class _Call:
    """A chunk being sampled: what has not arrived yet, and a table whose sample ids are still to come."""

    def __init__(self, slot: ActorSlot, handle: Any, chunk: _Chunk, tables_in_flight: int) -> None:
        self.slot, self.handle, self.chunk = slot, handle, chunk
        self.pending = {request.sample_id: request for request in chunk.requests}
        self.table: Any = None
        self._ending: Any = None
        method = handle.stream.options(
            num_returns="streaming", _generator_backpressure_num_objects=2 * tables_in_flight
        )
        self.items = method.remote(chunk.requests)
        slot.assigned(len(self.pending))

    def advance(self) -> RemoteFinished | None:
        """Take the next item, which is there: a table, then its sample ids, which complete it."""
        ref = next(self.items, None)
        if ref is None:
            fetch(self.table)  # a failed call ends with its error where a table would be
            raise RuntimeError(f"generator actor {self.slot.index} ended without samples {sorted(self.pending)}")
        if self.table is None:
            self.table = ref
            return None
        finished, self.table = RemoteFinished(self.table, fetch(ref)), None
        before = len(self.pending)
        for sample_id in finished.sample_ids:
            self.pending.pop(sample_id, None)
        self.slot.arrived(before - len(self.pending))
        return finished

    def end(self, sample_ids: set[str]) -> None:
        """Ask the actor to abort samples; asked again until they have arrived, since the call may not be there yet."""
        wanted = [sample_id for sample_id in self.pending if sample_id in sample_ids]
        if wanted and (self._ending is None or ray.wait([self._ending], timeout=0)[0]):
            self._ending = self.handle.abort.remote(wanted)

    def cancel(self) -> None:
        """Abort what is left; the actor stops sampling it."""
        ray.cancel(self.items)
        self.slot.assigned(-len(self.pending))


class Dispatch:
    """The state of one `ActorPool.stream` call.

    Events that another thread may set, seen within `POLL_SECONDS`: `aborted` ends all requests as such, `left` drops
    them, `closed` is the whole pool's. While `paused()`, no actor is asked for more; while `resting()`, none is
    expected to make progress.
    """

    def __init__(
        self,
        slots: Sequence[ActorSlot],
        requests: Sequence[SampleRequest],
        limits: Limits,
        spec: RoutingSpec,
        closed: threading.Event,
        paused: Callable[[], bool] = lambda: False,
        resting: Callable[[], bool] = lambda: False,
        resubmitted: Callable[[int], None] = lambda samples: None,
    ) -> None:
        self._paused, self._resting, self._resubmitted = paused, resting, resubmitted
        self._slots, self._limits, self._spec, self._closed = slots, limits, spec, closed
        self.aborted, self.left = threading.Event(), threading.Event()
        self._missing = {request.sample_id: request for request in requests}
        if len(self._missing) != len(requests):
            raise ValueError(f"{len(requests)} requests share {len(self._missing)} sample ids; each must be unique")
        size = min(limits.chunk_samples, -(-len(requests) // len(slots)))
        self._waiting = deque(_Chunk(tuple(requests[i : i + size])) for i in range(0, len(requests), size or 1))
        self._calls: list[_Call] = []
        self._discarded: set[str] = set()
        self._watchdog = Watchdog(limits.stall_seconds)

    def missing(self) -> set[str]:
        """Samples that have not arrived."""
        return set(self._missing)

    def discard(self, sample_ids: set[str]) -> None:
        """These samples are to end with finish_reason "abort"; from any thread."""
        self._discarded |= sample_ids

    def run(self) -> Iterator[RemoteFinished]:
        """Yield every sample once. Closing the iterator cancels what is still being sampled."""
        try:
            while self._missing and not self.left.is_set():
                if self.aborted.is_set():
                    self.cancel_calls()
                    yield from self._first_arrivals(aborted(list(self._missing.values()), self._spec))
                    return
                if self._closed.is_set():
                    yield from self._abort_waiting()
                else:
                    self._submit()
                self._watchdog.look({} if self._resting() else {call.handle: call.slot.index for call in self._calls})
                yield from self._end_discarded()
                for call in self._ready():
                    if not self._is_ended():
                        yield from self._advance(call)
        finally:
            self.cancel_calls()

    def cancel_calls(self) -> None:
        """Stop what the actors still sample for this stream. Not while another thread is inside `run`."""
        calls, self._calls = self._calls, []
        for call in calls:
            call.cancel()

    def _is_ended(self) -> bool:
        return self.aborted.is_set() or self.left.is_set()

    def _submit(self) -> None:
        wanted = self._waiting and not self._paused()
        ready = [(slot, slot.ready_handle()) for slot in self._slots] if wanted else []
        while self._waiting and (free := self._least_loaded(ready)) is not None:
            self._calls.append(_Call(*free, self._waiting.popleft(), self._limits.tables_in_flight))

    def _least_loaded(self, ready: list[tuple[ActorSlot, Any]]) -> tuple[ActorSlot, Any] | None:
        running = [call.slot for call in self._calls]
        limit = self._limits.outstanding_chunks
        free = [(slot, handle) for slot, handle in ready if handle is not None and running.count(slot) < limit]
        return min(free, key=lambda pair: pair[0].outstanding, default=None)

    def _ready(self) -> list[_Call]:
        """The calls that have an item; waits a moment for the first, or for an actor that is still loading."""
        loading = [slot.loading for slot in self._slots] if self._waiting else []
        refs = [call.items for call in self._calls] + [ref for ref in loading if ref is not None]
        if not refs:
            if self._waiting and self._paused():
                self.left.wait(POLL_SECONDS)
            return []
        ray.wait(refs, num_returns=1, timeout=POLL_SECONDS, fetch_local=False)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return [call for call in self._calls if any(call.items is ref for ref in ready)]

    def _advance(self, call: _Call) -> Iterator[RemoteFinished]:
        try:
            finished = call.advance()
        except LOST as error:
            self._resubmit(call, error)
            return
        if not call.pending:
            self._calls.remove(call)
        if finished is not None:
            yield from self._first_arrivals(finished)

    def _first_arrivals(self, finished: RemoteFinished) -> Iterator[RemoteFinished]:
        new = [sample_id for sample_id in finished.sample_ids if sample_id in self._missing]
        for sample_id in new:
            del self._missing[sample_id]
        if len(new) == len(finished.sample_ids):
            yield finished
        elif new:
            yield finished.only(new)

    def _resubmit(self, call: _Call, error: BaseException) -> None:
        """Queue what the dead actor still owed, first in line, and see to a new actor."""
        self._calls.remove(call)
        call.slot.assigned(-len(call.pending))
        if call.chunk.attempt >= self._limits.max_attempts and not self._closed.is_set():
            raise RuntimeError(
                f"{call.chunk.attempt} actors died over samples {sorted(call.pending)}; "
                f"the last error, of generator actor {call.slot.index}: {first_line(error)}"
            ) from error
        self._resubmitted(len(call.pending))
        self._waiting.appendleft(_Chunk(tuple(call.pending.values()), call.chunk.attempt + 1))
        call.slot.replace(call.handle, error)

    def _end_discarded(self) -> Iterator[RemoteFinished]:
        """Discarded samples that no actor has are answered here, the others by their actors."""
        if not self._discarded:
            return
        for call in self._calls:
            call.end(self._discarded)
        for _ in range(len(self._waiting)):
            chunk = self._waiting.popleft()
            ended = [request for request in chunk.requests if request.sample_id in self._discarded]
            kept = tuple(request for request in chunk.requests if request not in ended)
            if kept:
                self._waiting.append(replace(chunk, requests=kept))
            if ended:
                yield from self._first_arrivals(aborted(ended, self._spec))

    def _abort_waiting(self) -> Iterator[RemoteFinished]:
        """The pool was closed: requests that no actor began end as such."""
        while self._waiting:
            chunk = self._waiting.popleft()
            yield from self._first_arrivals(aborted(chunk.requests, self._spec))
