"""Run a user's reward function on finished traces: plain functions at once, coroutines side by side."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

from storage.trace import Trace

RewardFn = Callable[[Trace], float | Awaitable[float]]


class RewardRunner:
    """Calls `reward_fn(trace) -> float`; an `async def` one runs on an event loop of its own thread.

    >>> runner = RewardRunner(lambda trace: float(trace.text == "12"))
    """

    def __init__(self, reward_fn: RewardFn) -> None:
        self._fn = reward_fn
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def start(self, trace: Trace) -> Future[float]:
        """The reward to come. An error of the function is raised by `result()`, naming the sample.

        Raises:
            RuntimeError: after `close`, for a coroutine, which would never run.
        """
        if inspect.iscoroutinefunction(self._fn) or inspect.iscoroutinefunction(type(self._fn).__call__):
            return self._schedule(trace)
        future: Future[float] = Future()
        try:
            future.set_result(_checked(self._fn(trace), trace))
        except Exception as error:
            future.set_exception(_named(error, trace))
        return future

    async def _await(self, trace: Trace) -> float:
        try:
            value: Any = self._fn(trace)
            return _checked(await value, trace)
        except Exception as error:
            raise _named(error, trace) from error

    def _schedule(self, trace: Trace) -> Future[float]:
        with self._lock:  # what is scheduled before `close` stops the loop is cancelled there
            if self._closed:
                raise RuntimeError(f"the client was closed before the reward of {trace.sample_id} was computed")
            return asyncio.run_coroutine_threadsafe(self._await(trace), self._event_loop())

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_run_until_stopped, args=(self._loop,), name="moe-rollout-rewards", daemon=True
            )
            self._thread.start()
        return self._loop

    def close(self) -> None:
        """Stop the event loop, if one was started; rewards still to come are cancelled."""
        with self._lock:
            self._closed = True
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


def _checked(value: Any, trace: Trace) -> float:
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"reward_fn returned {value!r} for {trace.sample_id}, need a float") from error
    if not math.isfinite(reward):
        raise ValueError(f"reward_fn returned {value!r} for {trace.sample_id}, need a finite float")
    return reward


def _named(error: Exception, trace: Trace) -> Exception:
    error.add_note(f"raised by reward_fn for {trace.sample_id}; nothing of this step was committed")
    return error
