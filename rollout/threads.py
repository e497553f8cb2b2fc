"""Run a blocking function in a thread of its own and await it: asyncio's pool has few threads, and they are shared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(work: Callable[[], Result], name: str, on_cancel: Callable[[], None]) -> Result:
    """What `work` returns or raises.

    When the coroutine is cancelled, `on_cancel` is called, which must make `work` end soon; its end is awaited, so that
    nothing of it is left when the cancellation arrives at the caller.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    ended = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait([ended])
        if not ended.cancelled():
            ended.exception()  # seen: it says that the call was cancelled
        raise
