"""A rank's process ends when nobody is there to give it commands."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rollout import rank_process


@pytest.mark.parametrize("gone", [EOFError(), ConnectionResetError(104, "Connection reset by peer")])
def test_a_rank_leaves_however_its_pipe_ends_even_while_it_loads(monkeypatch: pytest.MonkeyPatch, gone: Exception):
    """A client that is killed before it has read all resets the pipe."""
    left, sent = threading.Event(), []

    def load(start: Any, send: Any) -> None:
        assert left.wait(60)
        raise ValueError("the end of loading")

    def receive() -> str:
        if messages:
            return messages.pop()
        raise gone

    messages = ["start"]
    monkeypatch.setattr(rank_process, "RankServer", load)
    rank_process.serve(receive, sent.append, left.set)
    assert [str(answer.error) for answer in sent] == ["the end of loading"]
