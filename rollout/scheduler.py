"""Which tokens the next forward computes: plain integers and deques, no tensors.

Decodes come first, then prompts that are under way, then waiting requests in order of arrival. A request is admitted
when a row and slots for its longest possible sequence are free, so that it never has to be pushed out again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rollout.backend import SampleRequest
from rollout.capture import RequestRoutes
from rollout.kv_pool import SlotAllocator
from rollout.stops import StopChecker
from storage.trace import FinishReason


@dataclass(eq=False)
class Request:
    """One sequence under way. `computed` and `sampled` count what was launched; `output_ids` what came back."""

    request: SampleRequest
    stop: StopChecker
    random_key: int
    routes: RequestRoutes | None
    weight_version: int = 0
    row: int = -1
    slot: int = -1
    capacity: int = 0
    computed: int = 0
    sampled: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def prompt_len(self) -> int:
        """P, tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def max_tokens(self) -> int:
        """Completion tokens at most."""
        return self.request.sampling_params.max_tokens

    @property
    def max_rows(self) -> int:
        """Tokens that can ever be an input: the last sampled one never is."""
        return self.prompt_len + max(self.max_tokens - 1, 0)

    @property
    def prefilling(self) -> bool:
        """Part of the prompt was not launched yet."""
        return self.computed < self.prompt_len


@dataclass(frozen=True)
class Work:
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
        return self.start >= self.request.prompt_len


class Scheduler:
    """Continuous batching with chunked prefill over a fixed number of rows, slots and tokens per step.

    With `whole_prompts` a prompt is never cut: the one that reaches `max_batch_tokens` may exceed it.
    """

    def __init__(
        self, max_running_requests: int, max_batch_tokens: int, kv_tokens: int, whole_prompts: bool = False
    ) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.whole_prompts = whole_prompts
        self.slots = SlotAllocator(kv_tokens)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_running = max_running_requests
        self._rows = list(range(max_running_requests))[::-1]

    def add(self, request: Request) -> None:
        """Queue a request that was already checked to fit the pool."""
        self.waiting.append(request)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self.waiting and not self.running

    def requests(self) -> Iterator[Request]:
        """All requests, running ones first."""
        yield from self.running
        yield from self.waiting

    def schedule(self) -> list[Work]:
        """The next step's work, decodes first; empty when every running request waits for its last result."""
        batch: list[Work] = []
        budget = self._take(batch, (r for r in self.running if not r.prefilling), self.max_batch_tokens)
        batch.sort(key=lambda work: work.request.slot)  # evenly spaced neighbours share one attention call
        budget = self._take(batch, (r for r in self.running if r.prefilling), budget)
        while budget > 0 and self.waiting and self._admit(self.waiting[0]):
            budget = self._take(batch, [self.running[-1]], budget)
        return batch

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
            left = request.prompt_len - start
            length = left if self.whole_prompts else min(left, budget)
        elif request.sampled < request.max_tokens:
            length = 1
        else:
            return None
        request.computed += length
        samples = not request.prefilling and request.sampled < max(request.max_tokens, 1)
        request.sampled += samples
        return Work(request, start, length, samples)

    def _admit(self, request: Request) -> bool:
        if not self._rows:
            return False
        capacity = self._capacity(request)
        slot = self.slots.allocate(capacity)
        if slot is None:
            return False
        self.waiting.popleft()
        request.slot, request.capacity, request.row = slot, capacity, self._rows.pop()
        self.running.append(request)
        return True

    def _capacity(self, request: Request) -> int:
        """Slots for the longest possible sequence; where the pool has room for all rows, rounded up to a power of two,
        which spaces requests evenly."""
        rounded = 1 << (request.max_rows - 1).bit_length()
        return rounded if rounded * self._max_running <= self.slots.size else request.max_rows

    def release(self, request: Request) -> None:
        """Take a finished request out, wherever it is. Steps in flight may still write its slots: they run before
        any step that a later owner of these slots takes part in."""
        if request.row < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.slots.release(request.slot, request.capacity)
        self._rows.append(request.row)


def flatten(batch: list[Work]) -> tuple[np.ndarray, np.ndarray]:
    """(position, slot) of each token of a step, int64 `[tokens]`."""
    position = np.concatenate([np.arange(w.start, w.start + w.length) for w in batch])
    offset = np.repeat([w.request.slot for w in batch], [w.length for w in batch])
    return position, position + offset
