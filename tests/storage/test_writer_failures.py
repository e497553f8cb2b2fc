"""TraceWriter when the disk fails, writers race, threads share it, or a writer has died."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pytest

from storage import StepExistsError, TraceDataset, TraceWriter, clean_staging
from tests.storage.builders import SPEC, commit, make_trace, make_traces


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow past `size`: a full disk without a small disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    commit(tmp_path, 0)
    big = [make_trace(1, sample, completion=20_000) for sample in range(16)]
    with TraceWriter(tmp_path, SPEC) as writer:
        with (
            largest_file(100_000),
            pytest.raises(OSError, match="step 1 was abandoned and may be written again") as caught,
        ):
            writer.write(big, step=1)
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path))
        assert list((tmp_path / "_staging").iterdir()) == []
        writer.write(big[:1], step=1)
        writer.commit(1)
    dataset = TraceDataset(tmp_path)
    assert (len(dataset), dataset.verify()) == (6, [])


@pytest.mark.parametrize("call", range(5))
def test_a_disk_that_fails_at_any_fsync_of_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    commit(tmp_path, 0)
    calls = iter(range(99))
    real = os.fsync

    def failing(descriptor: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(1), step=1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            if call < 4:  # part, manifest, staging directory, dataset directory
                with pytest.raises(OSError, match="No space left on device"):
                    writer.commit(1)
            else:
                writer.commit(1)
        dataset = TraceDataset(tmp_path)
        assert dataset.steps == ([0] if call < 3 else [0, 1])  # the last fsync comes after the rename
        assert dataset.verify() == []
        if call < 3:
            writer.write(make_traces(1), step=1)
            writer.commit(1)
    assert len(TraceDataset(tmp_path)) == 10


def test_of_two_writers_that_race_for_a_step_exactly_one_wins(tmp_path: Path) -> None:
    for step in range(10):
        barrier, results = threading.Barrier(2), []

        def race(sample: int, step: int = step, barrier=barrier, results=results) -> None:
            with TraceWriter(tmp_path, SPEC) as writer:
                writer.write([make_trace(step, sample)], step=step)
                barrier.wait()
                try:
                    writer.commit(step)
                    results.append(sample)
                except StepExistsError:
                    results.append(None)

        threads = [threading.Thread(target=race, args=(sample,)) for sample in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = set(results) - {None}
        assert len(results) == 2
        assert list(TraceDataset(tmp_path).iter(step)) == [make_trace(step, winner)]
    assert TraceDataset(tmp_path).verify() == []


RACER = """
import sys
from storage import StepExistsError, TraceWriter
from tests.storage.builders import SPEC, make_traces
won = []
with TraceWriter(sys.argv[1], SPEC) as writer:
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(40):
        try:
            writer.write(make_traces(step), step=step)
            writer.commit(step)
            won.append(step)
        except StepExistsError:
            pass
print(won)
"""


@pytest.mark.full
def test_two_processes_that_write_the_same_steps_commit_each_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    assert [racer.stdout and racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    one, other = (json.loads(racer.communicate(timeout=60)[0]) for racer in racers)
    assert [racer.returncode for racer in racers] == [0, 0]
    assert sorted(one + other) == list(range(40))
    query = f"select count(*), count(distinct sample_id) from '{tmp_path}/*-*/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(200, 200)]
    assert (TraceDataset(tmp_path).verify(), list((tmp_path / "_staging").iterdir())) == ([], [])


def test_a_step_committed_between_two_looks_of_a_writer_exists_already(tmp_path: Path) -> None:
    """The other writer commits after this one has seen that the step is free, before it compares sample_ids."""
    with TraceWriter(tmp_path, SPEC) as slow, TraceWriter(tmp_path, SPEC) as fast:
        check = slow._check_rows

        def late(*arguments: Any) -> None:
            fast.write(make_traces(0), step=0)
            fast.commit(0)
            check(*arguments)

        slow._check_rows = late  # type: ignore[method-assign]
        with pytest.raises(StepExistsError, match="step 0 is committed"):
            slow.write(make_traces(0), step=0)


def test_threads_share_a_writer(tmp_path: Path) -> None:
    traces = make_traces(0, 60)
    with TraceWriter(tmp_path, SPEC) as writer:
        threads = [
            threading.Thread(target=lambda part=traces[i::4]: [writer.write([trace], step=0) for trace in part])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.commit(0)
    dataset = TraceDataset(tmp_path)
    assert sorted(trace.sample_id for trace in dataset) == sorted(trace.sample_id for trace in traces)
    assert dataset.verify() == []


def test_cleaning_spares_live_writers_and_other_hosts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unique = "0" * 32
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        dead = tmp_path / "_staging" / f"000000001-{os.uname().nodename}-{unique}"
        elsewhere = tmp_path / "_staging" / f"000000001-another-host-{unique}"
        dead.mkdir()
        elsewhere.mkdir()
        (elsewhere / "part-00000.staging").write_bytes(b"half")
        for path in (elsewhere / "part-00000.staging", elsewhere):
            os.utime(path, (86_400, 86_400))
        report = (
            f"{elsewhere}: of a writer on host another-host, last written 1970-01-02T00:00:00+00:00, 4 bytes; if no "
            f"writer runs there any more, `moe-rollout verify {tmp_path} --repair --all-hosts` removes it"
        )
        assert TraceDataset(tmp_path).verify() == [
            f"{dead}: left by a writer that died; storage.clean_staging({str(tmp_path)!r}) removes it",
            report,
        ]
        with caplog.at_level(logging.WARNING):
            assert clean_staging(tmp_path) == [dead]
        assert str(dead) in caplog.text
        assert report in caplog.messages
        assert clean_staging(tmp_path, all_hosts=True) == [elsewhere]
        writer.commit(0)
    assert TraceDataset(tmp_path).verify() == []


def stage_elsewhere(root: Path) -> Path:
    """An open step of a writer on another host that has just written to it."""
    elsewhere = root / "_staging" / f"000000001-another-host-{'0' * 32}"
    elsewhere.mkdir()
    (elsewhere / "part-00000.staging").write_bytes(b"half")
    return elsewhere


def test_a_dataset_is_sound_while_a_writer_of_another_host_writes_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(tmp_path, 0)
    elsewhere = stage_elsewhere(tmp_path)
    with caplog.at_level(logging.INFO):
        assert TraceDataset(tmp_path).verify() == []
    (record,) = (record for record in caplog.records if str(elsewhere) in record.message)
    assert (record.levelname, "4 bytes" in record.message) == ("INFO", True)
    for age, problems in ((3500, 0), (3700, 1)):
        for path in (elsewhere / "part-00000.staging", elsewhere):
            os.utime(path, (time.time() - age,) * 2)
        assert len(TraceDataset(tmp_path).verify()) == problems


def test_staging_that_the_file_server_has_forgotten_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit(tmp_path, 0)
    elsewhere = stage_elsewhere(tmp_path)
    os.utime(elsewhere, (86_400, 86_400))
    real = os.open

    def stale(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path) == elsewhere:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", stale)
    TraceWriter(tmp_path, SPEC).close()
    text = f"{elsewhere}: of a writer on host another-host, which cannot be judged (Stale file handle); if no writer"
    assert text in caplog.text
    assert [problem[: len(text)] for problem in TraceDataset(tmp_path).verify()] == [text]
    assert clean_staging(tmp_path, all_hosts=True) == []
    assert f"{elsewhere} is left: it cannot be judged" in caplog.text
