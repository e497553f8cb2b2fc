"""Run a blocking function in a thread of its own and await it: asyncio's pool has few threads, and they are shared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], name: str) -> Result:
    """What `work` returns or raises. When the coroutine is cancelled, the thread goes on until `work` ends."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # from here on a cancelled coroutine leaves the future to the thread

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
