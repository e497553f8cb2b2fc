"""One rank of a group as a process of its own: an engine that is told what to do over a pipe.

    python -m rollout.rank_process FILE_DESCRIPTOR

The other end is rollout/rank_link.py. The first message is a `RankStart`, the others are `Command`s; back come
`Answer`s and `Ended` samples. The process ends when its pipe does, or when its engine stops.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rollout.backend import SampleRequest
from rollout.figures import Figures
from rollout.parallel import CollectiveError
from rollout.rank_messages import LOAD, Answer, Command, Ended, Message, RankStart, Send
from rollout.request import Request
from storage.schema import to_table

logger = logging.getLogger(__name__)


class _Ticket(NamedTuple):
    """The outbox of one request: what comes back carries its number."""

    number: int
    outbox: queue.SimpleQueue[tuple[int, Request | BaseException]]

    def put(self, ended: Request | BaseException, /) -> None:
        self.outbox.put((self.number, ended))


class RankServer:
    """Carries out commands. `send` takes messages from any thread; one at a time."""

    def __init__(self, start: RankStart, send: Send) -> None:
        from rollout.local_backend import LocalBackend

        self._send = send
        self._backend = LocalBackend(start.model, member=start.member, **start.engine_options)
        self._ended: queue.SimpleQueue[tuple[int, Request | BaseException]] = queue.SimpleQueue()
        self._entries: dict[int, list[Request]] = {}
        self._update = ExitStack()
        self._apply: Any = None
        self._calls = ThreadPoolExecutor(4, "moe-rollout-call")
        threading.Thread(target=self._report, name="moe-rollout-report", daemon=True).start()
        self.info = self._backend.info

    def run(self, command: Command) -> None:
        """Begin a command. Only those that ask for an answer may take time: they have a thread."""
        if command.answer is None:
            getattr(self, command.name)(*command.args)
        else:
            self._calls.submit(self._answer, command)
        self._backend.wake_rank(command.epoch)

    def stopped(self) -> BaseException | None:
        """Wait for the engine's end: the error that ended it."""
        return self._backend.wait_stopped()

    def submit(self, tickets: list[tuple[int, SampleRequest]]) -> None:
        """Queue requests under the numbers they come back with."""
        for number, request in tickets:
            self._entries[number] = self._backend.submit([request], _Ticket(number, self._ended), set())

    def end(self, numbers: list[int]) -> None:
        """Abort requests; those that have ended meanwhile are no error."""
        for number in numbers:
            if (entries := self._entries.get(number)) is not None:
                self._backend.abort_requests(entries)

    def wake_only(self) -> None:
        """Another rank was fed."""

    def pause(self, mode: Any) -> None:
        """See Backend.pause."""
        self._backend.pause(mode)

    def resume(self) -> None:
        """See Backend.resume."""
        self._backend.resume()

    def stage(self, directory: str, saved: bool, version: int, force: bool, check_finite: bool) -> None:
        """Check an update and hold it ready."""
        stack = ExitStack()
        update = self._backend.prepare_update(directory, version, force=force, check_finite=check_finite, saved=saved)
        self._apply = stack.enter_context(update)
        self._update = stack

    def apply(self, in_flight: Any, kv: Any) -> None:
        """Carry out what was staged, behind the same step as all ranks."""
        with self._update:
            self._apply(in_flight, kv)

    def drop(self) -> None:
        """Forget what was staged."""
        self._update.close()

    def sleep(self, level: int, in_flight: Any) -> None:
        """See Backend.sleep."""
        self._backend.sleep(level, in_flight=in_flight)

    def check_weights(self, directory: str, saved: bool, version: int, force: bool, check_finite: bool) -> None:
        """Raise what `wake` would raise for these weights."""
        self._backend.check_weights(directory, version, force=force, check_finite=check_finite, saved=saved)

    def wake(self, directory: str | None, saved: bool, version: int | None, force: bool, check_finite: bool) -> None:
        """See Backend.wake."""
        self._backend.wake(directory, version, force=force, check_finite=check_finite, saved=saved)

    def stats(self) -> dict[str, Any]:
        """See LocalBackend.rank_stats."""
        return self._backend.rank_stats()

    def figures(self) -> Figures:
        """See Backend.figures."""
        return self._backend.figures()

    def close(self) -> None:
        """Stop the engine."""
        self._backend.close()

    def _answer(self, command: Command) -> None:
        assert command.answer is not None
        try:
            answer = Answer(command.answer, getattr(self, command.name)(*command.args))
        except Exception as error:
            answer = Answer(command.answer, error=portable(error))
        self._send(answer)

    def _report(self) -> None:
        """Hand over samples as they end. What a dead engine left is told by the end of this process."""
        while True:
            number, ended = self._ended.get()
            self._entries.pop(number, None)
            if isinstance(ended, Request):
                self._send(self._ended_trace(number, ended))
            elif not self._backend.is_dead:
                self._send(Ended(number, None, portable(ended)))

    def _ended_trace(self, number: int, request: Request) -> Ended:
        """Its trace, or what is wrong with it: the client waits for one of both."""
        try:
            return Ended(number, to_table([self._backend.trace(request)], self.info.spec))
        except Exception as error:
            return Ended(number, None, portable(error))


def portable(error: BaseException) -> Exception:
    """An error that another process can read: itself, or one with its words."""
    for kind in (ValueError, TypeError, FileNotFoundError, RuntimeError, CollectiveError):
        if type(error) is kind:
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def serve(receive: Callable[[], Any], send: Send, leave: Callable[[], None]) -> None:
    """Start the rank that the first message describes, then carry out commands until there are no more.

    `leave` ends the process at once: when the engine has stopped, since the other ranks are not to wait for this one,
    and when nobody gives commands any more, even while the model is loaded.
    """
    start = receive()
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                commands.put(receive())
        except (EOFError, OSError) as error:  # the latter when it died before it had read what was sent
            logger.debug("nobody gives commands any more: %r", error)
        finally:
            leave()

    threading.Thread(target=listen, name="moe-rollout-listen", daemon=True).start()
    try:
        server = RankServer(start, send)
    except Exception as error:
        send(Answer(LOAD, error=portable(error)))
        return
    send(Answer(LOAD, server.info))

    def watch() -> None:
        error = server.stopped()
        if error is not None:
            send(Answer(LOAD, error=portable(error)))
            leave()

    threading.Thread(target=watch, name="moe-rollout-watch", daemon=True).start()
    while True:
        server.run(commands.get())


def main(descriptor: int) -> None:
    """Serve the pipe that this process inherited."""
    connection: Connection[Message, Any] = Connection(descriptor)
    lock = threading.Lock()

    def send(message: Message) -> None:
        with lock:
            connection.send(message)

    logging.basicConfig(level=logging.WARNING)
    serve(connection.recv, send, lambda: os._exit(1))


if __name__ == "__main__":
    main(int(sys.argv[1]))
