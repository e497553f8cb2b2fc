"""An event loop in a thread of its own, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines of other threads until `stop`.

    >>> loop = LoopThread("example")
    >>> loop.call(asyncio.sleep(0, "slept"))
    'slept'
    >>> loop.stop()
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()  # between "is it stopped?" and handing work to the loop
        self._stopped = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it; behind `stop` it is cancelled, and nothing is begun."""
        with self._lock:
            if not self._stopped:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        refused: Future[T] = Future()
        refused.cancel()
        return refused

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, or its exception; CancelledError of concurrent.futures when `stop` came before its end."""
        return self.submit(work).result()

    def soon(self, function: Callable[[], Any]) -> None:
        """Call it on the loop, and do not wait."""
        self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel what is left, and end the thread."""
        with self._lock:
            self._stopped = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
