"""Which tokens the next forward computes: plain integers and deques, no tensors.

Decodes come first, then prompts that are under way, then waiting requests in order of arrival. Where the pool holds
every request at its longest, a request gets the slots of its longest sequence at once, evenly spaced. Elsewhere it
begins with what its known tokens need and its run of slots grows; when the pool is full the youngest request yields. It
keeps what it has sampled and its rows, and recomputes its keys and values later, under replay of these rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from rollout.kv_pool import SlotAllocator
from rollout.prefix_cache import Hit, Prefix, PrefixCache
from rollout.request import Request

MIN_GROWTH = 16


class Work(NamedTuple):
    """Tokens `[start, start + length)` of one request in one step; `samples` when its last position is drawn from.

    A prompt-only request draws once too: the token is dropped, but logits that are not finite are seen.
    """

    request: Request
    start: int
    length: int
    samples: bool

    @property
    def drawn(self) -> int:
        """Completion tokens drawn before this step's."""
        return self.start + self.length - self.request.prompt_len

    @property
    def is_decode(self) -> bool:
        """True when the token is still on the device: it was sampled by an earlier step."""
        return self.start >= self.request.known


class SlotStore(Protocol):
    """Who holds the keys and values. Calls take effect behind the steps launched before and ahead of the next."""

    def move_slots(self, source: int, target: int, count: int) -> None:
        """Move `count` slots, which may overlap their new place."""

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copy `count` slots to another place."""

    def clear_slots(self, slot: int, count: int) -> None:
        """Forget `count` slots."""


class NoStore:
    """For a scheduler without a device."""

    def move_slots(self, source: int, target: int, count: int) -> None:
        """Nothing to move."""

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Nothing to copy."""

    def clear_slots(self, slot: int, count: int) -> None:
        """Nothing to forget."""


class Scheduler:
    """Continuous batching with chunked prefill over a fixed number of rows, slots and tokens per step.

    With `whole_prompts` a prompt is never cut: the one that reaches `max_batch_tokens` may exceed it. With `preempts`
    False, for a model whose recomputation cannot be made to repeat its routes, a request waits for the slots of its
    longest sequence and never yields. No step has more than `max_step_tokens`, the rows of the capture buffer.
    """

    def __init__(
        self,
        max_running_requests: int,
        max_batch_tokens: int,
        kv_tokens: int,
        whole_prompts: bool = False,
        preempts: bool = True,
        store: SlotStore | None = None,
        cache: PrefixCache | None = None,
        max_step_tokens: int | None = None,
    ) -> None:
        if max_step_tokens is not None and max_batch_tokens > max_step_tokens:
            raise ValueError(
                f"max_batch_tokens={max_batch_tokens}, but routes are captured of {max_step_tokens} at most"
            )
        self.max_step_tokens = max_step_tokens
        self.max_batch_tokens = max_batch_tokens
        self.whole_prompts = whole_prompts
        self.slots = SlotAllocator(kv_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.cached_tokens = 0
        self.admits_new = True
        self.weight_version = 0
        self._epoch = 0
        self._cache = cache
        self._preempts = preempts
        self._store = store or NoStore()
        self.hold = False  # admit none that has not begun
        self._max_running = max_running_requests
        self._arrivals = 0
        self._rows = list(range(max_running_requests))[::-1]

    def add(self, request: Request) -> None:
        """Queue a request that was already checked to fit the pool."""
        request.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    @property
    def waits(self) -> bool:
        """Nothing runs, and nothing that may begin waits."""
        return not self.running and not (self.waiting and self._may_begin(self.waiting[0]))

    def _may_begin(self, request: Request) -> bool:
        return request.yielded or (self.admits_new and not self.hold)

    def requests(self) -> Iterator[Request]:
        """All requests, running ones first."""
        yield from self.running
        yield from self.waiting

    def check_fits(self, request: Request) -> None:
        """Raises ValueError when a step with the whole prompt could have more tokens than can be captured."""
        longest = self.max_batch_tokens - 1 + request.max_rows if self.whole_prompts else self.max_batch_tokens
        if self.max_step_tokens is not None and longest > self.max_step_tokens:
            raise ValueError(
                f"a step with all {request.max_rows} tokens of this request could have {longest}, but routes are "
                f"captured of {self.max_step_tokens} at most; lower max_batch_tokens={self.max_batch_tokens}"
            )

    def schedule(self) -> list[Work]:
        """The next step's work, decodes first; empty when every running request waits for its last result."""
        for request in self.running:
            request.ready = request.computed
        self._make_room()
        batch: list[Work] = []
        budget = self._take(batch, (r for r in self.running if not r.prefilling), self.max_batch_tokens)
        batch.sort(key=lambda work: work.request.slot)  # evenly spaced neighbours share one attention call
        budget = self._take(batch, (r for r in self.running if r.prefilling), budget)
        for request in list(self.waiting):
            if budget <= 0 or not self._admit(request):
                break
            if request.row >= 0:
                budget = self._take(batch, [request], budget)
        return batch

    @property
    def begun(self) -> list[Request]:
        """Requests that have rows already: those that run, and those that yielded and wait to go on."""
        return [*self.running, *(request for request in self.waiting if request.yielded)]

    def _take(self, batch: list[Work], requests: Iterable[Request], budget: int) -> int:
        for request in requests:
            if budget <= 0:
                break
            work = self._next_work(request, budget)
            if work is not None:
                batch.append(work)
                budget -= work.length
        return budget

    def _next_work(self, request: Request, budget: int) -> Work | None:
        start = request.computed
        if request.prefilling:
            left = request.known - start
            length = left if self.whole_prompts else min(left, budget)
        elif request.sampled < request.max_tokens:
            length = 1
        else:
            return None
        request.computed += length
        request.in_flight += 1
        samples = not request.prefilling and request.sampled < max(request.max_tokens, 1)
        request.sampled += samples
        return Work(request, start, length, samples)

    def _make_room(self) -> None:
        """Slots for the next token of every decode, the oldest first; the youngest requests yield theirs."""
        for request in sorted(self.running, key=lambda r: r.arrival):
            wants_more = not request.prefilling and request.sampled < request.max_tokens
            while wants_more and request.row >= 0 and request.computed >= request.capacity and not self._grow(request):
                self.preempt(max(self.running, key=lambda r: r.arrival))

    def _grow(self, request: Request) -> bool:
        for growth in (request.capacity, MIN_GROWTH):
            capacity = min(request.capacity + growth, request.max_rows)
            slot = self.slots.resize(request.slot, request.capacity, capacity)
            if slot is None and self._evict():
                return self._grow(request)
            if slot is not None:
                if slot != request.slot:
                    self._store.move_slots(request.slot, slot, request.computed)
                request.slot, request.capacity = slot, capacity
                return True
        return False

    def preempt(self, request: Request) -> None:
        """Take a running request's slots. It waits ahead of those that arrived later, and recomputes then."""
        self.preemptions += 1
        self._vacate(request, keep=True)
        request.computed, request.yielded = 0, True
        self.waiting.appendleft(request)

    def _admit(self, request: Request) -> bool:
        """Give a waiting request a row and slots. False ends the admissions of this step; True without a row lets those
        behind it go first: another request is about to compute its prefix."""
        if not self._rows or not self._may_begin(request):
            return False
        if request.in_flight:  # what it sampled is not on the host yet
            return False
        request.begin()
        hit = self._find(request)
        if hit is not None and hit.pending:
            return True
        capacity = self._capacity(request)
        slot = self._allocate(capacity, hit.prefix if hit is not None else None)
        if slot is None and hit is not None:
            hit, slot = None, self._allocate(capacity, None)
        if slot is None:
            return False
        self.waiting.remove(request)
        request.slot, request.capacity, request.row = slot, capacity, self._rows.pop()
        self.running.append(request)
        self._take_over(request, hit)
        return True

    def _find(self, request: Request) -> Hit | None:
        wants_all = request.wanted is not None and request.wanted.wants_prompt  # logits of every prompt token
        return None if self._cache is None or wants_all else self._cache.find(request)

    def _take_over(self, request: Request, hit: Hit | None) -> None:
        if request.epoch is None:
            request.epoch = self._epoch
        if hit is not None and hit.length:
            self._store.copy_slots(hit.prefix.place, request.slot, hit.length)
            request.take_over(hit.length, hit.prefix.routes, hit.prefix.owner)
            self.cached_tokens += hit.length
        if self._cache is not None and request.epoch == self._epoch and request.is_of(self.weight_version):
            self._cache.begin(request)

    def _allocate(self, capacity: int, keep: Prefix | None) -> int | None:
        """Slots, for which prefixes that nobody owns make room."""
        while (slot := self.slots.allocate(capacity)) is None and self._evict(keep):
            pass
        return slot

    def _evict(self, keep: Prefix | None = None) -> bool:
        victim = None if self._cache is None else self._cache.evict(keep)
        if victim is not None:
            self._free(victim)
        return victim is not None

    def _free(self, prefix: Prefix) -> None:
        self._store.clear_slots(prefix.slot, prefix.length)
        self.slots.release(prefix.slot, prefix.capacity)

    def weights_changed(self, version: int) -> None:
        """Nothing that was computed before may serve a request that comes now."""
        self.weight_version = version
        self._epoch += 1
        for prefix in self._cache.forget() if self._cache is not None else ():
            self._free(prefix)

    def _capacity(self, request: Request) -> int:
        """Slots to begin with. Powers of two space requests evenly. One that yielded comes back when its longest
        sequence fits, so that it does not yield again and again."""
        longest = _power_of_two(request.max_rows)
        if longest * self._max_running <= self.slots.size:
            return longest
        if request.yielded or not self._preempts:
            return request.max_rows
        return min(_power_of_two(max(request.known + 1, MIN_GROWTH)), request.max_rows)

    def release(self, request: Request) -> None:
        """Take a finished request out, wherever it is. Steps in flight may still write its slots: they run before
        any step that a later owner of these slots takes part in."""
        if request.row < 0:
            self.waiting.remove(request)
        else:
            self._vacate(request, keep=request.finish_reason != "error")

    def _vacate(self, request: Request, keep: bool) -> None:
        self.running.remove(request)
        if self._cache is None or not self._cache.end(request, keep):
            self._store.clear_slots(request.slot, request.computed)
            self.slots.release(request.slot, request.capacity)
        self._rows.append(request.row)
        request.row = -1

    def check(self) -> None:
        """Every slot and row has one owner or none.

        Raises:
            RuntimeError: naming what leaked or has two owners.
        """
        left = self._cache.left() if self._cache is not None else []
        owned = [(r.slot, r.slot + r.capacity) for r in self.running] + [(p.slot, p.slot + p.capacity) for p in left]
        rows = sorted([*self._rows, *(r.row for r in self.running)])
        if rows != list(range(self._max_running)):
            raise RuntimeError(f"rows {rows} of {self._max_running} are free or in use: one leaked or has two owners")
        self.slots.check(owned)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def flatten(batch: list[Work]) -> tuple[np.ndarray, np.ndarray]:
    """(position, slot) of each token of a step, int64 `[tokens]`."""
    lengths, starts, slots = np.array([(w.length, w.start, w.request.slot) for w in batch], np.int64).reshape(-1, 3).T
    position = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return position, position + np.repeat(slots, lengths)
