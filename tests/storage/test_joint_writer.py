"""Several writers of one step: their parts appear at once, each sample once, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from storage import DuplicateSampleError, StepExistsError, TraceDataset, TraceWriter, clean_staging
from storage.joint_writer import JointWriter
from storage.open_folder import Parts
from tests.storage.builders import SPEC, make_trace, make_traces


def part(step: int, first: int, count: int = 2) -> list:
    return [make_trace(step, sample) for sample in range(first, first + count)]


def staged(root: Path) -> list[Path]:
    return sorted((root / "_staging").iterdir())


def hand_over(writer: JointWriter, step: int) -> Parts:
    parts = writer.hand_over(step)
    assert parts is not None
    return parts


def test_the_parts_of_three_writers_are_one_commit(tmp_path: Path) -> None:
    with (
        JointWriter(tmp_path, SPEC) as first,
        JointWriter(tmp_path, SPEC, max_part_bytes=1) as second,
        JointWriter(tmp_path, SPEC) as third,
    ):
        first.write(part(0, 0), step=0)
        second.write(part(0, 2, count=18), step=0)  # two row groups, so two files
        third.write(part(0, 20), step=0)
        parts = [hand_over(second, 0), hand_over(third, 0)]
        assert TraceDataset(tmp_path).steps == []
        first.take_over(parts, step=0)
        first.write(part(0, 22), step=0)  # its own part goes on behind
        first.commit(0)
        for helper in (second, third):
            helper.release(0)
        assert staged(tmp_path) == []
    names = sorted(path.name for path in (tmp_path / "step-000000000").glob("*.parquet"))
    assert names == [f"part-{number:05d}.parquet" for number in range(5)]
    dataset = TraceDataset(tmp_path)
    assert list(dataset) == part(0, 0, count=24)
    assert dataset.verify() == []
    query = f"select count(*), count(distinct sample_id) from '{tmp_path}/*-*/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(24, 24)]


def test_one_that_wrote_nothing_itself_may_commit(tmp_path: Path) -> None:
    with JointWriter(tmp_path, SPEC) as first, JointWriter(tmp_path, SPEC) as helper:
        assert helper.hand_over(3) is None
        helper.write(make_traces(3), step=3)
        first.take_over([hand_over(helper, 3)], step=3)
        first.commit(3)
        helper.release(3)
    assert list(TraceDataset(tmp_path).iter(3)) == make_traces(3)


def test_a_sample_that_two_wrote_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    with JointWriter(tmp_path, SPEC) as first, JointWriter(tmp_path, SPEC) as helper:
        first.write(part(0, 0), step=0)
        helper.write(part(0, 1), step=0)
        with pytest.raises(DuplicateSampleError, match=r"'run/0/1/0' was written to step 0 before"):
            first.take_over([hand_over(helper, 0)], step=0)
        helper.abandon(0)
        assert (staged(tmp_path), TraceDataset(tmp_path).steps) == ([], [])


def test_a_sample_that_another_step_has_is_refused_at_the_commit(tmp_path: Path) -> None:
    with JointWriter(tmp_path, SPEC) as first, JointWriter(tmp_path, SPEC) as helper:
        helper.write([make_trace(1, 0, sample_id="run/0/0/0")], step=1)
        first.take_over([hand_over(helper, 1)], step=1)
        with TraceWriter(tmp_path, SPEC) as other:
            other.write(make_traces(0), step=0)
            other.commit(0)
        with pytest.raises(DuplicateSampleError, match="'run/0/0/0' is committed in step 0"):
            first.commit(1)
        helper.abandon(1)
    assert (TraceDataset(tmp_path).steps, staged(tmp_path)) == ([0], [])


def test_of_two_that_commit_the_same_step_one_wins(tmp_path: Path) -> None:
    with JointWriter(tmp_path, SPEC) as first, JointWriter(tmp_path, SPEC) as helper:
        helper.write(part(0, 2), step=0)
        first.take_over([hand_over(helper, 0)], step=0)
        with TraceWriter(tmp_path, SPEC) as other:
            other.write(part(0, 0), step=0)
            other.commit(0)
        with pytest.raises(StepExistsError, match="step 0 is committed"):
            first.commit(0)
        helper.abandon(0)
        assert staged(tmp_path) == []
    assert list(TraceDataset(tmp_path)) == part(0, 0)


def test_what_is_handed_over_can_be_dropped_but_not_handed_over_twice(tmp_path: Path) -> None:
    with JointWriter(tmp_path, SPEC) as helper:
        helper.write(part(0, 0), step=0)
        helper.hand_over(0)
        with pytest.raises(ValueError, match="step 0 was handed over already"):
            helper.hand_over(0)
        helper.abandon(0)
        assert staged(tmp_path) == []
        helper.write(part(0, 0), step=0)
        helper.hand_over(0)
    assert staged(tmp_path) == []  # closing drops it too


def test_a_file_that_is_gone_is_an_error_and_nothing_is_committed(tmp_path: Path) -> None:
    with JointWriter(tmp_path, SPEC) as first, JointWriter(tmp_path, SPEC) as helper:
        first.write(part(0, 0), step=0)
        helper.write(part(0, 2), step=0)
        parts = hand_over(helper, 0)
        shutil.rmtree(tmp_path / parts.folder)
        with pytest.raises(FileNotFoundError, match="step 0 was abandoned and may be written again"):
            first.take_over([parts], step=0)
    assert (TraceDataset(tmp_path).steps, staged(tmp_path)) == ([], [])


KILLED = """
import os, signal, sys, time
from storage.joint_writer import JointWriter
from tests.storage.builders import SPEC, make_traces
writer = JointWriter(sys.argv[1], SPEC)
writer.write(make_traces(0), step=0)
if sys.argv[2] == "after":
    parts = writer.hand_over(0)
    print(parts.folder, *[f"{f.path} {f.bytes} {f.sha256} {f.rows}" for f in parts.files])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_helper_that_is_killed(tmp_path: Path, when: str) -> None:
    """Before it hands over its part is litter; after it the part is whole and may be committed."""
    from storage.manifest import PartFile

    command = [sys.executable, "-c", KILLED, str(tmp_path), when]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    first = JointWriter(tmp_path, SPEC)
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout
    if when == "after":
        folder, path, size, digest, rows = output.split()
        ids = [trace.sample_id for trace in make_traces(0)]
        first.take_over([Parts(folder, [PartFile(path, int(size), digest, int(rows), ids)])], step=0)
        first.commit(0)
        assert list(TraceDataset(tmp_path)) == make_traces(0)
    (litter,) = clean_staging(tmp_path)
    assert litter.name.startswith("000000000-")
    first.close()
    assert TraceDataset(tmp_path).verify() == []


def test_the_order_of_durable_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def short(path: str) -> str:
        names = {first_staging: "FIRST", helper_staging: "HELPER", str(tmp_path): "."}
        return next(path.replace(long, name) for long, name in names.items() if path.startswith(long))

    def fsync(descriptor: int) -> None:
        seen.append("fsync " + short(os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source: object, target: object) -> None:
        seen.append(f"rename {short(str(source))} {short(str(target))}")
        real_rename(str(source), str(target))

    with JointWriter(tmp_path, SPEC) as first, JointWriter(tmp_path, SPEC) as helper:
        first.write(part(7, 0), step=7)
        (first_staging,) = map(str, staged(tmp_path))
        helper.write(part(7, 2), step=7)
        (helper_staging,) = {str(path) for path in staged(tmp_path)} - {first_staging}
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", rename)
        first.take_over([hand_over(helper, 7)], step=7)
        first.commit(7)
    assert seen == [
        "fsync HELPER/part-00000.staging",
        "fsync FIRST/part-00000.staging",
        "rename HELPER/part-00000.staging FIRST/part-00001.staging",
        "fsync FIRST/_manifest.json",
        "rename FIRST/part-00000.staging FIRST/part-00000.parquet",
        "rename FIRST/part-00001.staging FIRST/part-00001.parquet",
        "fsync FIRST",
        "rename FIRST ./step-000000007",
        "fsync .",
    ]
