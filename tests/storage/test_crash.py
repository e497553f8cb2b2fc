"""A writer killed before each of its durable operations in turn: readers see whole steps, and the work goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from storage import TraceDataset, TraceWriter
from storage.card import card
from tests.storage.builders import SPEC, make_traces

CRASHER = """
import os, signal, sys
from pathlib import Path
from storage import TraceWriter
from tests.storage.builders import SPEC, make_traces

def kill_before(number):
    calls = iter(range(1, 10_000))
    for name in ("fsync", "rename", "link", "mkdir", "unlink"):
        def patched(*args, real=getattr(os, name), **kwargs):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        setattr(os, name, patched)

def write(root):
    with TraceWriter(root, SPEC) as writer:
        for step in (0, 1):
            writer.write(make_traces(step), step=step)
            writer.commit(step)

number, status = 0, None
while status != 0:
    number += 1
    child = os.fork()
    if child == 0:
        kill_before(number)
        write(Path(sys.argv[1], str(number)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
print(number)
"""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """One directory per operation before which the writer was killed, in order; the last was not killed."""
    root = tmp_path_factory.mktemp("crashes")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    count = subprocess.check_output([sys.executable, "-c", CRASHER, str(root)], text=True, env=environment)
    return [root / str(number) for number in range(1, int(count) + 1)]


def steps_at(root: Path) -> list[int]:
    try:
        return TraceDataset(root).steps
    except FileNotFoundError:
        return []


def test_readers_see_whole_steps_and_the_next_writer_goes_on(crashed: list[Path]) -> None:
    states = []
    for root in crashed:
        steps = steps_at(root)
        states.append(steps)
        for step in steps:
            assert list(TraceDataset(root).iter(step)) == make_traces(step)
        with TraceWriter(root, SPEC) as writer:
            for step in sorted({0, 1} - set(steps)):
                writer.write(make_traces(step), step=step)
                writer.commit(step)
        assert TraceDataset(root).verify() == []
        for name, end in (("README.md", card(SPEC)), ("run.json", "}")):  # whole or absent
            assert not (path := root / name).exists() or path.read_text().endswith(end), path
        query = f"select count(*), count(distinct sample_id) from '{root}/**/*.parquet'"
        assert duckdb.sql(query).fetchall() == [(10, 10)]
    assert states == sorted(states)
    assert [state for i, state in enumerate(states) if state not in states[:i]] == [[], [0], [0, 1]]
    assert len(states) > 15
