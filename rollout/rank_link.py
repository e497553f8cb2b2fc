"""The near end of a rank: start its process, send it commands, read what it answers until it dies."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

from rollout.backend import ModelInfo
from rollout.lockstep import Membership
from rollout.parallel import CollectiveError, Layout
from rollout.rank_messages import LOAD, Answer, Command, Ended, Message, RankStart

logger = logging.getLogger(__name__)
SETTLE_SECONDS = 2.0


class RankDiedError(RuntimeError):
    """A rank of a group is gone, and so is its group."""


class RankLink(Protocol):
    """A rank somewhere else."""

    def send(self, message: RankStart | Command) -> None:
        """Hand a message over, without waiting for a rank that does not read; one to a dead rank is lost."""

    def receive(self) -> Message:
        """Wait for the next one. Raises EOFError when the rank is gone."""

    def kill(self) -> None:
        """End it at once."""


class ProcessLink:
    """A rank in a child process on this machine. Raises OSError when it cannot be started."""

    def __init__(self, num_threads: int) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(part or os.getcwd() for part in sys.path)
        with contextlib.closing(theirs):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollout.rank_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt is this process's to handle
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(num_threads)},
            )
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="moe-rollout-write", daemon=True).start()

    def send(self, message: RankStart | Command) -> None:
        """See RankLink."""
        self._outgoing.put(bytes(ForkingPickler.dumps(message)))

    def receive(self) -> Message:
        """See RankLink."""
        try:
            message: Message = self._connection.recv()
        except (EOFError, OSError) as error:
            raise EOFError(f"process {self.process.pid} ended with status {self.process.wait()}") from error
        return message

    def kill(self) -> None:
        """See RankLink."""
        self.process.kill()
        self.process.wait()
        self._outgoing.put(None)

    def _write(self) -> None:
        """A pipe takes so many bytes that its rank has not read, then it blocks."""
        try:
            while (message := self._outgoing.get()) is not None:
                self._connection.send_bytes(message)
        except OSError as error:
            logger.debug("rank process %d takes no more messages: %s", self.process.pid, error)


class RankSet:
    """The ranks of one started group, alive together or dead together.

    Args:
        on_ended: called with each sample that ended, from any thread.
        on_death: called once, with the reason, when a rank died after `start` had returned.
    """

    def __init__(
        self,
        links: Sequence[RankLink],
        on_ended: Callable[[Ended], None],
        on_death: Death,
    ) -> None:
        self.links = links
        self._on_ended, self._on_death = on_ended, on_death
        self._lock = threading.Lock()
        self._epoch = 0
        self._calls = 0
        self._waiting: dict[tuple[int, int], Future[Any]] = {}
        self._reason: RankDiedError | None = None
        self._last_words: dict[int, Exception] = {}
        self._serving = False

    @property
    def reason(self) -> RankDiedError | None:
        """Why the ranks are dead; None while they live."""
        return self._reason

    def start(self, starts: Sequence[RankStart]) -> ModelInfo:
        """Load the model on every rank.

        Raises:
            Exception: why a rank could not, in its own type and words; no rank is left.
        """
        loaded: list[Future[Any]] = [self._expect(rank, LOAD) for rank in range(len(self.links))]
        for rank, (link, start) in enumerate(zip(self.links, starts, strict=True)):
            link.send(start)
            threading.Thread(target=self._read, args=(rank,), name=f"moe-rollout-rank-{rank}", daemon=True).start()
        wait(loaded, return_when=FIRST_EXCEPTION)
        if any(future.done() and future.exception() for future in loaded):
            wait(loaded, timeout=SETTLE_SECONDS)  # the reason of one is a missing neighbour to the others
            errors = [error for future in loaded if future.done() and (error := future.exception()) is not None]
            self.kill()
            raise next((e for e in errors if not isinstance(e, CollectiveError | RankDiedError)), errors[0])
        self._serving = True
        info: ModelInfo = loaded[0].result()
        return info

    def tell(self, name: str, args: dict[int, tuple[Any, ...]]) -> None:
        """A command without an answer to some ranks; the others are told that there was one."""
        with self._lock:
            self._epoch += 1
            for rank, link in enumerate(self.links):
                link.send(Command(self._epoch, name, args[rank]) if rank in args else Command(self._epoch, "wake_only"))

    def ask(self, name: str, *args: Any, within: float | None = None) -> list[Any]:
        """The same command to every rank, and what they answer; ranks that take more than `within` seconds are killed.

        Raises:
            RankDiedError: a rank died; what the others say then is a consequence.
            Exception: the first rank's error, when all have answered.
        """
        futures = self.ask_later(name, *args)
        if wait(futures, within).not_done:
            self._give_up([rank for rank, future in enumerate(futures) if not future.done()], name, within)
            wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, RankDiedError)):
            raise error
        return [future.result() for future in futures]

    def ask_later(self, name: str, *args: Any) -> list[Future[Any]]:
        """The same without waiting for the answers."""
        with self._lock:
            self._epoch += name not in ("close", "figures")  # nobody is woken: ranks end at rest
            self._calls += 1
            number = self._calls
            futures = [self._expect(rank, number) for rank in range(len(self.links))]
            for link in self.links:
                link.send(Command(self._epoch, name, args, number))
            return futures

    def kill(self) -> None:
        """End all ranks."""
        self._serving = False
        for link in self.links:
            link.kill()

    def _give_up(self, silent: list[int], name: str, seconds: float | None) -> None:
        """These ranks stand still: end all, which their readers see."""
        for rank in silent:
            self._last_words.setdefault(rank, TimeoutError(f"did not answer {name!r} within {seconds:g} s"))
        for link in self.links:
            link.kill()

    def _expect(self, rank: int, number: int) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting[rank, number] = future
        if self._reason is not None:
            self._waiting.pop((rank, number)).set_exception(self._reason)
        return future

    def _read(self, rank: int) -> None:
        while True:
            try:
                message = self.links[rank].receive()
            except EOFError as error:
                self._died(rank, error)
                return
            if isinstance(message, Ended):
                self._on_ended(message)
            else:
                self._answered(rank, message)

    def _answered(self, rank: int, message: Answer) -> None:
        with self._lock:
            future = self._waiting.pop((rank, message.answer), None)
        if future is None:
            if message.error is not None:
                self._last_words[rank] = message.error
        elif message.error is not None:
            future.set_exception(message.error)
        else:
            future.set_result(message.value)

    def _died(self, rank: int, error: EOFError) -> None:
        with self._lock:
            if self._reason is not None:
                return
            words = "; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in sorted(self._last_words.items()))
            self._reason = RankDiedError(
                f"rank {rank} of {len(self.links)} died ({error}){'; ' + words if words else ''}"
            )
            waiting, self._waiting = list(self._waiting.values()), {}
        serving = self._serving
        if serving:
            self.kill()
        for future in waiting:
            future.set_exception(self._reason)
        if serving:
            self._on_death(self, self._reason)


Death = Callable[[RankSet, RankDiedError], None]
Launch = Callable[[int, str, dict[str, Any]], tuple[list[RankLink], str]]
"""Called with `(size, directory, engine options)`: the ranks' links, and where they are to meet."""


def launch_processes(size: int, directory: str, engine_options: dict[str, Any]) -> tuple[list[RankLink], str]:
    """Child processes that meet in a file of `directory`."""
    threads = int(engine_options.get("num_threads", 1))
    meeting = tempfile.mkdtemp(prefix="start-", dir=directory)
    return [ProcessLink(threads) for _ in range(size)], f"file://{Path(meeting) / 'rendezvous'}"


def members(size: int, layout: Layout, meeting: str, timeout_s: float, graphs: tuple[int, ...]) -> list[Membership]:
    """Of all ranks of one group."""
    return [Membership(rank, size, layout, meeting, timeout_s, graphs) for rank in range(size)]
