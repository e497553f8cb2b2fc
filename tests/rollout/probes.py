"""Hold, fail and inspect a local engine from a test, at a given forward instead of a given time."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rollout import RolloutClient, SamplingParams


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy, ended by length unless `options` name a stop."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompts(count: int, length: int = 5) -> list[list[int]]:
    """Different prompts of ids 3 to 92."""
    return [[3 + (7 * i + 11 * j) % 90 for j in range(length)] for i in range(count)]


def parts_of(client: RolloutClient) -> tuple[Any, Any, Any]:
    """(engine, scheduler, model) of a local client."""
    backend: Any = client.backend
    built = backend._built
    return built.engine, built.engine._scheduler, built.runner.model


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Poll; AssertionError when it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def assert_all_free(client: RolloutClient, max_running_requests: int) -> None:
    """The engine comes to rest with every slot and every row free."""
    engine, scheduler, _ = parts_of(client)
    wait_until(lambda: engine.idle)
    assert scheduler.slots.free_slots == scheduler.slots.size
    assert len(scheduler._rows) == max_running_requests


@contextlib.contextmanager
def before_forward(client: RolloutClient, action: Callable[[int], None]) -> Iterator[None]:
    """Call `action(n)` on the device thread before the n-th forward from now."""
    number = itertools.count()

    def hook(_module: Any, _args: Any) -> None:
        action(next(number))

    handle = parts_of(client)[2].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def device_held_at(client: RolloutClient, forward: int) -> Iterator[threading.Event]:
    """The device stops before a forward until the yielded event is set."""
    release = threading.Event()

    def hold(n: int) -> None:
        if n == forward:
            release.wait(60)

    with before_forward(client, hold):
        try:
            yield release
        finally:
            release.set()
