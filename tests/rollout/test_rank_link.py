"""The near end of ranks that stand still: nobody waits for them for ever."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from rollout import rank_link
from rollout.group_progress import GroupProgress
from rollout.rank_link import ProcessLink, RankDiedError, RankSet
from rollout.rank_messages import LOAD, Answer, Command

SOCKET_BUFFER = 212_992  # bytes, of a pipe on Linux


def test_messages_to_a_process_that_does_not_read_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    popen = subprocess.Popen
    monkeypatch.setattr(rank_link.subprocess, "Popen", lambda command, **kwargs: popen(["sleep", "60"], **kwargs))
    link = ProcessLink(num_threads=1)
    message = Command(1, "submit", ("x" * 2 * SOCKET_BUFFER,))
    sender = threading.Thread(target=lambda: [link.send(message) for _ in range(4)], daemon=True)
    sender.start()
    sender.join(5)
    assert not sender.is_alive()
    link.kill()
    with pytest.raises(EOFError, match="ended with status -9"):
        link.receive()


class Link:
    """A rank that answers each command with its own name; a `silent` one only says that it has loaded."""

    def __init__(self, silent: bool = False) -> None:
        self._silent = silent
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: Any) -> None:
        if not isinstance(message, Command):
            self._answers.put(Answer(LOAD, "info"))
        elif not self._silent and message.answer is not None:
            self._answers.put(Answer(message.answer, message.name))

    def receive(self) -> Any:
        if (answer := self._answers.get()) is None:
            raise EOFError("killed")
        return answer

    def kill(self) -> None:
        self._answers.put(None)


def test_ranks_of_which_one_does_not_answer_in_time_are_dead() -> None:
    deaths: list[RankDiedError] = []
    ranks = RankSet([Link(), Link(silent=True)], lambda ended: None, lambda ranks, reason: deaths.append(reason))
    ranks.start(["start"] * 2)  # type: ignore[list-item]
    begun = time.monotonic()
    with pytest.raises(RankDiedError, match=r"rank . of 2 died .*rank 1: TimeoutError: did not answer 'figures'"):
        ranks.ask("figures", within=0.2)
    assert time.monotonic() - begun < 5
    with pytest.raises(RankDiedError):
        ranks.ask("figures")
    for _ in range(500):  # the reader's thread tells it behind the answer
        if deaths:
            break
        time.sleep(0.01)
    assert deaths == [ranks.reason]


def test_ranks_that_answer_in_time_live() -> None:
    ranks = RankSet([Link(), Link()], lambda ended: None, lambda ranks, reason: None)
    ranks.start(["start"] * 2)  # type: ignore[list-item]
    assert ranks.ask("figures", within=30) == ["figures", "figures"]
    assert ranks.reason is None


class Asked:
    """A RankSet whose answers the test gives."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def ask_later(self, name: str) -> list[Future]:
        assert name == "figures"
        self.futures = [Future(), Future()]
        return self.futures

    def answer(self, *tokens: int) -> None:
        for future, count in zip(self.futures, tokens, strict=True):
            future.set_result({"tokens_computed_total": count})


def test_progress_is_what_the_ranks_last_said_and_never_waits_for_them() -> None:
    progress, ranks = GroupProgress(), Asked()
    first = progress.of(ranks)
    assert progress.of(ranks) == first  # they have not answered
    ranks.answer(30, 12)
    assert progress.of(ranks) == first + 42
    ranks.answer(31, 12)
    assert progress.of(ranks) == first + 43
    assert progress.of(None) is None  # new ones are started
    assert progress.of(Asked()) > first + 43
