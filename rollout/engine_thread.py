"""A thread that steps a synchronous engine, and runs commands of others between its steps."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from rollout.engine_reply import EngineDeadError

T = TypeVar("T")


class _Command(NamedTuple):
    run: Callable[[], Any]
    done: Future[Any]


class EngineThread:
    """Runs until `stop`, or until a step fails; then every command that waits or comes later fails too.

    Args:
        busy: whether there is anything to step.
        step: one step of the engine; an exception ends the thread.
        ended: called on the thread at its end, with the exception of the step or None.
    """

    def __init__(
        self, busy: Callable[[], bool], step: Callable[[], None], ended: Callable[[Exception | None], None]
    ) -> None:
        self._busy, self._step, self._ended = busy, step, ended
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between "has it ended?" and queueing a command
        self._over: str | None = None
        self._thread = threading.Thread(target=self._run, name="moe-rollout-vllm", daemon=True)
        self._thread.start()

    async def do(self, command: Callable[[], T]) -> T:
        """`command()` between two steps; its exceptions are raised here.

        Raises:
            EngineDeadError: the thread has ended, or ends before it comes to this.
        """
        done: Future[T] = Future()
        with self._lock:
            if self._over is not None:
                raise EngineDeadError(self._over)
            self._commands.put(_Command(command, done))
        return await asyncio.wrap_future(done)

    async def stop(self) -> None:
        """End the thread behind the commands that wait; nothing when it has ended."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            while self._run_command():
                if self._busy():
                    self._step()
        except Exception as raised:
            error = raised
        self._fail_the_rest("vLLM's thread has ended" + (f": {type(error).__name__}: {error}" if error else ""))
        self._ended(error)

    def _run_command(self) -> bool:
        """One that waits; wait for one when there is nothing to step. False to stop."""
        if self._busy() and self._commands.empty():
            return True
        command = self._commands.get()
        if command is not None and command.done.set_running_or_notify_cancel():
            try:
                command.done.set_result(command.run())
            except Exception as error:
                command.done.set_exception(error)
        return command is not None

    def _fail_the_rest(self, why: str) -> None:
        with self._lock:
            self._over = why
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.done.set_running_or_notify_cancel():
                command.done.set_exception(EngineDeadError(why))
