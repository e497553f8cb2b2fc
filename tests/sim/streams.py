"""Streams, events and the clock of the simulated device: what is queued, when it runs, how long it takes.

An adversary decides when queued work runs, within what streams and events allow. Simulated time is kept apart from
that: it follows from the costs alone.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType

import torch


@dataclass(eq=False)
class Op:
    """One kernel, copy or event in a stream; it runs after `waits`. `queued`, `finish`: simulated seconds."""

    name: str
    run: Callable[[], None]
    stream: Stream
    waits: list[Op]
    queued: float
    finish: float
    done: bool = False


class Clock:
    """Simulated seconds. Host time is what `read` says, less what is spent inside `paused`; waiting jumps ahead.

    Attributes:
        read: seconds of host time: real ones, or the calls of `CountedCalls`.
        kernel, copy: seconds that one takes on the device.
        waited: seconds that the host has waited for the device.
    """

    def __init__(self) -> None:
        self.kernel = self.copy = self.waited = 0.0
        self.read: Callable[[], float] = time.perf_counter
        self._offset = -self.read()
        self._pauses = 0

    def take_host_time(self, read: Callable[[], float]) -> None:
        """From now on, without a jump."""
        with self.paused():
            self.read = read

    def now(self) -> float:
        return self._stopped_at if self._pauses else self.read() + self._offset

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The simulation's own work takes no time."""
        self._stopped_at, self._pauses = self.now(), self._pauses + 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._offset = self._stopped_at - self.read()

    def wait_until(self, moment: float) -> None:
        with self.paused():
            waited = max(0.0, moment - self._stopped_at)
            self._stopped_at += waited
            self.waited += waited


class CountedCalls:
    """Host time that no other program can change: a microsecond for each call that this thread makes.

    >>> with CountedCalls() as host:
    ...     before = host()
    ...     after = (abs(-1), host())[1]
    >>> round((after - before) * 1e6)
    2
    """

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self) -> float:
        return self._calls * 1e-6

    def __enter__(self) -> CountedCalls:
        self._before = sys.getprofile()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(self._before)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        self._calls += event in ("call", "c_call")


class Stream:
    """First in, first out."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.queue: deque[Op] = deque()
        self._scheduler = scheduler
        self._waits: list[Op] = []
        self._free_at = self.busy = 0.0
        self.follows = False
        scheduler.streams.append(self)

    def enqueue(self, name: str, run: Callable[[], None], cost: float = 0.0) -> Op:
        waits, self._waits = self._waits, []
        start = max([self._free_at, self._scheduler.clock.now(), *(op.finish for op in waits)])
        op = Op(name, run, self, waits, self._scheduler.clock.now(), start + cost)
        self._free_at = op.finish
        self.busy += cost
        self.queue.append(op)
        self._scheduler.adversary(self._scheduler.streams)
        return op

    def wait_event(self, event: Event) -> None:
        """What is queued from now on runs after the event."""
        if event.op is not None:
            self._waits.append(event.op)
            self.follows = True

    def wait_stream(self, other: Stream) -> None:
        with self._scheduler.clock.paused():
            self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        with self._scheduler.clock.paused():
            event = event or Event(self._scheduler)
            event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def run_one(self) -> None:
        """Run the next op, and before it what it waits for."""
        head = self.queue[0]
        for other in head.waits:
            other.stream.run_until(other)
        if self.queue and self.queue[0] is head:
            self.queue.popleft()
            with torch.inference_mode():
                head.run()
            head.done = True

    def run_until(self, op: Op) -> None:
        while not op.done:
            self.run_one()


class Event:
    """Done when all that its stream had queued when it was recorded is done."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.op: Op | None = None
        self._scheduler = scheduler

    def record(self, stream: Stream) -> None:
        self.op = stream.enqueue("event", lambda: None)

    def query(self) -> bool:
        return self.op is None or self.op.done

    def synchronize(self) -> None:
        if self.op is not None:
            self._scheduler.wait(self.op)


Adversary = Callable[[Iterable[Stream]], None]


def late(streams: Iterable[Stream]) -> None:
    """Nothing runs before somebody waits for it."""


def early(streams: Iterable[Stream]) -> None:
    """Everything runs at once."""
    for stream in streams:
        while stream.queue:
            stream.run_one()


def copies_late(streams: Iterable[Stream]) -> None:
    """Streams that never waited for another one run at once, the others as late as possible."""
    for stream in streams:
        while stream.queue and not stream.follows:
            stream.run_one()


class Seeded:
    """Streams run on by random amounts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, streams: Iterable[Stream]) -> None:
        for stream in streams:
            while stream.queue and self._random.random() < 0.5:
                stream.run_one()


@dataclass
class Scheduler:
    """All streams of a device, the adversary that runs them, and the clock."""

    adversary: Adversary = late
    clock: Clock = field(default_factory=Clock)
    streams: list[Stream] = field(default_factory=list)

    def wait(self, op: Op) -> None:
        """The host waits for `op`, in simulated time too."""
        with self.clock.paused():
            op.stream.run_until(op)
        self.clock.wait_until(op.finish)
