"""Compaction and retention: the same samples from fewer files, and readers that see the old or the new, never half."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow.compute as pc
import pytest

from storage import DamagedDataError, DuplicateSampleError, StepExistsError, TraceDataset, TraceWriter
from storage.catalog import Catalog
from storage.store import LocalStore
from tests.storage.builders import SPEC, commit, make_trace, make_traces
from tests.storage.test_crash import CRASHER

STEPS = (0, 1, 2, 5)
ALL = [trace for step in STEPS for trace in make_traces(step)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    commit(tmp_path, *STEPS)
    return tmp_path


def folders(root: Path) -> list[str]:
    return sorted(path.name[:24] for path in root.glob("*-*"))


def test_a_pack_holds_what_the_steps_held(root: Path) -> None:
    TraceDataset(root).annotate(1, {"run/1/2/0": {"reward": 5.0}})
    expected = list(TraceDataset(root))
    dataset = TraceDataset(root)
    (pack,) = dataset.compact()
    assert folders(root) == ["pack-000000000-000000005"]
    assert len(list(root.glob("pack-*/*.parquet"))) == 1
    for reader in (dataset, TraceDataset(root)):
        assert (reader.steps, len(reader), list(reader)) == (list(STEPS), 20, expected)
        assert list(reader.iter(2)) == make_traces(2)
        assert list(reader.iter([5, 0])) == make_traces(5) + make_traces(0)
        assert reader["run/5/3/0"] == make_traces(5)[3]
        assert reader["run/1/2/0"].reward == 5.0
        assert [t.sample_id for t in reader.iter(filter=pc.field("reward") > 1)] == ["run/1/2/0"]
        assert set(reader.to_arrow(2, columns=["step"])["step"].to_pylist()) == {2}
        assert reader.verify() == []
        assert list(reader.torch()) == expected
    query = f"select count(*), count(distinct sample_id) from '{root}/*-*/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(20, 20)]
    assert TraceDataset(root).compact() == []
    assert pack.startswith("pack-000000000-000000005-")


def test_steps_that_are_packed_or_archived_while_a_reader_looks_are_not_missed(root: Path) -> None:
    """The first look sees steps, then a pack, that are gone before their manifests are asked for."""

    class Slow(LocalStore):
        meanwhile: Callable[[], object]

        def names(self, folder: str = "") -> list[str]:
            found = super().names(folder)
            self.once()
            return found

        def once(self) -> None:
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()

    class SlowToRead(Slow):
        names = LocalStore.names

        def read(self, name: str) -> bytes:
            self.once()
            return super().read(name)

    store = Slow(root)
    store.meanwhile = TraceDataset(root).compact
    assert Catalog(store).steps == list(STEPS)
    reader = SlowToRead(root)
    reader.meanwhile = lambda: TraceDataset(root).archive(before=6)
    assert Catalog(reader).steps == list(STEPS)
    assert reader.meanwhile() is None


def test_writers_go_on_after_it(root: Path) -> None:
    TraceDataset(root).compact()
    with TraceWriter(root, SPEC) as writer:
        assert writer.next_step() == 6
        with pytest.raises(StepExistsError, match="step 2 is committed"):
            writer.write(make_traces(2), step=2)
        with pytest.raises(DuplicateSampleError, match="'run/1/0/0' is committed in step 1"):
            writer.write([make_trace(3, 0, sample_id="run/1/0/0")], step=3)
        writer.write(make_traces(3), step=3)
        writer.commit(3)
    assert TraceDataset(root).steps == [0, 1, 2, 3, 5]
    assert TraceDataset(root).verify() == []


def test_large_steps_stay_and_separate_the_packs(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        for step in range(5):
            writer.write([make_trace(step, 0, completion=20_000 if step == 2 else 3)], step=step)
            writer.commit(step)
    TraceDataset(tmp_path).compact(max_bytes=100_000)
    assert folders(tmp_path) == ["pack-000000000-000000001", "pack-000000003-000000004", "step-000000002"]
    assert [trace.step for trace in TraceDataset(tmp_path)] == [0, 1, 2, 3, 4]


def test_damage_is_not_copied(root: Path) -> None:
    part = root / "step-000000001/part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[600] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedDataError, match="step-000000001"):
        TraceDataset(root).compact()
    assert folders(root) == [f"step-{step:09d}" for step in STEPS]
    assert list((root / "_staging").iterdir()) == []


def test_a_reader_that_opened_before_reads_on(root: Path) -> None:
    dataset = TraceDataset(root)
    traces = dataset.iter()
    begun = [next(traces) for _ in range(7)]  # in the middle of step 1
    TraceDataset(root).compact()
    assert begun + list(traces) == ALL


def test_a_reader_that_missed_a_drop_is_told(root: Path) -> None:
    traces = TraceDataset(root).iter()
    next(traces)
    TraceDataset(root).keep_from(5)
    with pytest.raises(ValueError, match=r"step 1 of .* was dropped while it was read"):
        list(traces)


def test_a_torch_stream_goes_on_beside_it(root: Path) -> None:
    traces = iter(TraceDataset(root).torch())
    begun = [next(traces)]
    TraceDataset(root).compact()
    assert begun + list(traces) == ALL


def test_readers_beside_a_compaction(tmp_path: Path) -> None:
    commit(tmp_path, *range(30))
    expected = [trace for step in range(30) for trace in make_traces(step)]
    thread = threading.Thread(target=TraceDataset(tmp_path).compact, kwargs={"max_bytes": 60_000})
    thread.start()
    rounds = 0
    while thread.is_alive() or rounds == 0:
        dataset = TraceDataset(tmp_path)
        assert list(dataset) == expected
        assert dataset["run/7/2/0"] == make_traces(7)[2]
        rounds += 1
    thread.join()
    assert list(TraceDataset(tmp_path)) == expected


def test_dropped_steps_are_gone_and_stay_gone(root: Path) -> None:
    dataset = TraceDataset(root)
    dataset.annotate(0, {"run/0/0/0": {"reward": 1.0}})
    dataset.keep_from(2)
    assert (dataset.steps, list(dataset)) == ([2, 5], make_traces(2) + make_traces(5))
    assert folders(root) == ["step-000000002", "step-000000005"]
    assert list((root / "_annotations").iterdir()) == []
    assert dataset.verify() == []
    with (
        TraceWriter(root, SPEC) as writer,
        pytest.raises(ValueError, match=r"steps before 2 of .* were dropped; go on"),
    ):
        writer.write(make_traces(1), step=1)
    with pytest.raises(ValueError, match=r"steps before 2 of .* are dropped already"):
        dataset.keep_from(1)


def test_dropping_a_part_of_a_pack(root: Path) -> None:
    dataset = TraceDataset(root)
    dataset.compact()
    dataset.keep_from(2)
    assert (dataset.steps, len(dataset), list(dataset)) == ([2, 5], 10, make_traces(2) + make_traces(5))
    assert "run/0/0/0" not in dataset
    dataset.keep_from(6)
    assert (folders(root), dataset.steps, dataset.verify()) == ([], [], [])
    with TraceWriter(root, SPEC) as writer:
        assert writer.next_step() == 6


@pytest.mark.parametrize(
    ("action", "states"),
    [
        pytest.param("compact()", [[0, 1, 2, 5]], marks=pytest.mark.full),
        pytest.param("archive(9)", [[0, 1, 2, 5]], marks=pytest.mark.full),
        ("keep_from(2)", [[0, 1, 2, 5], [2, 5]]),
    ],
)
def test_killed_before_any_durable_operation(tmp_path: Path, action: str, states: list[list[int]]) -> None:
    code = CRASHER.split("def write(root):")[0].replace('"unlink")', '"unlink", "rmdir")')
    loop = CRASHER.split("number, status = 0, None")[1]
    body = "def write(root):\n    commit(root, 0, 1, 2, 5)\n    arm()\n"
    body += f"    from storage import TraceDataset\n    TraceDataset(root).{action}\n"
    script = code.replace("make_traces", "commit").replace("def kill_before(number):\n", "def armed(number):\n")
    script += body + "number, status = 0, None" + loop
    script = script.replace("        kill_before(number)\n", "        arm = lambda: armed(number)\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    count = int(subprocess.check_output([sys.executable, "-c", script, str(tmp_path)], text=True, env=environment))
    assert count > 8
    seen = []
    for number in range(1, count + 1):
        root = tmp_path / str(number)
        dataset = TraceDataset(root)
        assert list(dataset) == [trace for step in dataset.steps for trace in make_traces(step)]
        seen += [dataset.steps] if dataset.steps not in seen else []
        TraceWriter(root, SPEC).close()
        dataset.compact()
        assert (dataset.verify(), len(dataset)) == ([], 5 * len(dataset.steps))
        query = f"select count(*), count(distinct sample_id) from '{root}/*-*/*.parquet'"
        assert duckdb.sql(query).fetchall()[0][0] >= len(dataset)
    assert seen == states


def test_nobody_is_told_to_remove_a_folder_that_is_in_a_pack(root: Path) -> None:
    with (
        TraceWriter(root, SPEC) as writer,
        pytest.raises(StepExistsError, match=r"or remove .*step-000000001 to sample"),
    ):
        writer.write(make_traces(1), step=1)
    TraceDataset(root).compact()
    with TraceWriter(root, SPEC) as writer, pytest.raises(StepExistsError, match=r"go on with step 6$"):
        writer.write(make_traces(1), step=1)
