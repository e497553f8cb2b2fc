"""An index that contradicts itself counts as absent, whatever its checksum; verify compares it with the manifests."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from storage import DuplicateSampleError, TraceDataset, TraceWriter
from tests.storage.builders import SPEC, commit, make_trace, make_traces

Lists = dict[str, list[Any]]
TYPES = {
    "folder": pa.string(),
    "samples": pa.int64(),
    "size": pa.int64(),
    "written": pa.int64(),
    "hash": pa.uint64(),
    "owner": pa.int32(),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "traces"
    commit(root, 0, 1)
    TraceDataset(root).build_index()
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "traces")  # with the times of the manifests, which the index knows


def lists_of(root: Path) -> Lists:
    batch = pa.ipc.open_file(root / "_index.arrow").get_batch(0)
    return {name: batch.column(name)[0].as_py() for name in TYPES}


def forge(root: Path, columns: dict[str, pa.Array]) -> None:
    """These columns with the checksum that they have."""
    crc = 0
    for column in columns.values():
        for buffer in column.buffers():
            crc = zlib.crc32(buffer, crc) if buffer is not None else crc
    batch = pa.record_batch(columns).replace_schema_metadata({"moe_rollout.index": f"1 {crc}"})
    with pa.ipc.new_file(root / "_index.arrow", batch.schema) as writer:
        writer.write_batch(batch)


def columns_of(lists: Lists, **types: pa.DataType) -> dict[str, pa.Array]:
    kinds = TYPES | types
    return {name: pa.array([values], pa.list_(kinds[name])) for name, values in lists.items()}


FORGED: dict[str, Callable[[Lists], dict[str, pa.Array]]] = {
    "a count": lambda x: columns_of(x | {"samples": [10**12, 5]}),
    "counts that are moved": lambda x: columns_of(x | {"samples": [4, 6]}),
    "a negative count": lambda x: columns_of(x | {"samples": [-5, 15]}),
    "a count that is missing": lambda x: columns_of(x | {"samples": [5]}),
    "a folder that is missing": lambda x: columns_of(x | {"folder": x["folder"][:1]}),
    "a stamp that is missing": lambda x: columns_of(x | {"written": x["written"][:1]}),
    "a folder twice": lambda x: columns_of(x | {"folder": x["folder"][:1] * 2}),
    "an owner that is missing": lambda x: columns_of(x | {"owner": x["owner"][:-1]}),
    "an owner too large": lambda x: columns_of(x | {"owner": [*x["owner"][:-1], 2]}),
    "a negative owner": lambda x: columns_of(x | {"owner": [-1, *x["owner"][1:]]}),
    "no folders": lambda x: columns_of(x | {name: [] for name in x if name not in ("hash", "owner")}),
    "hashes out of order": lambda x: columns_of(x | {"hash": x["hash"][::-1]}),
    "another type of hash": lambda x: columns_of(x | {"hash": [1.0] * 10}, hash=pa.float64()),
    "a null": lambda x: columns_of(x | {"size": [None, 1]}),
    "no row": lambda x: {name: column.slice(0, 0) for name, column in columns_of(x).items()},
    "a column that is missing": lambda x: {n: c for n, c in columns_of(x).items() if n != "owner"},
}


@pytest.mark.parametrize("change", FORGED)
def test_what_contradicts_itself_counts_as_absent(root: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    forge(root, FORGED[change](lists_of(root)))
    dataset = TraceDataset(root)
    assert len(dataset) == 10
    assert "run/1/4/0" in dataset
    assert "run/2/0/0" not in dataset
    assert "_index.arrow is not used" in caplog.text
    with TraceWriter(root, SPEC) as writer, pytest.raises(DuplicateSampleError, match="'run/1/4/0' is committed"):
        writer.write([make_trace(7, 0, sample_id="run/1/4/0")], step=7)
    (problem,) = dataset.verify()
    assert problem.startswith(f"{root / '_index.arrow'}: is not used (")
    dataset.build_index()
    assert dataset.verify() == []


def test_verify_compares_the_index_with_the_manifests(root: Path) -> None:
    lists = lists_of(root)
    forge(root, columns_of(lists))
    assert TraceDataset(root).verify() == []
    lists["hash"][3] += 1
    forge(root, columns_of(lists))
    folder = lists["folder"][lists["owner"][3]]
    problem = f"{root / '_index.arrow'}: lists other samples of {folder} than its manifest; remove it, build_index()"
    assert TraceDataset(root).verify() == [f"{problem} writes a new one"]


def test_an_index_without_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TraceWriter(tmp_path, SPEC).close()
    TraceDataset(tmp_path).build_index()
    assert (len(TraceDataset(tmp_path)), TraceDataset(tmp_path).verify(), caplog.text) == (0, [], "")


def test_ids_of_one_hash_are_told_apart_and_a_committed_one_is_still_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.committed.sample_hash", lambda sample_id: 7)
    with TraceWriter(tmp_path, SPEC) as writer:
        for step in range(3):
            writer.write(make_traces(step, 2), step=step)
            writer.commit(step)
        (again,) = make_traces(1, 1)
        again.step = 3
        with pytest.raises(DuplicateSampleError, match="'run/1/0/0' is committed in step 1"):
            writer.write([again], step=3)
        assert writer._committed._hashes.tolist() == [7] * 6
    assert len(TraceDataset(tmp_path)) == 6


@pytest.mark.parametrize("indexed", [False, True])
def test_a_writer_knows_the_samples_of_a_step_that_was_removed_and_written_again(tmp_path: Path, indexed: bool) -> None:
    commit(tmp_path, 0)
    if indexed:
        TraceDataset(tmp_path).build_index()
    with TraceWriter(tmp_path, SPEC) as long, TraceWriter(tmp_path, SPEC) as other:
        long.write(make_traces(1), step=1)
        long.commit(1)
        shutil.rmtree(tmp_path / "step-000000000")
        long.write(make_traces(2), step=2)  # it sees that step 0 is gone
        other.write([make_trace(0, 7), make_trace(0, 8)], step=0)
        other.commit(0)
        twice = make_trace(0, 7)
        twice.step = 3
        with pytest.raises(DuplicateSampleError, match="'run/0/7/0' is committed in step 0"):
            long.write([twice], step=3)
        again = make_trace(0, 1)  # of the step 0 that is gone
        again.step = 3
        long.write([again], step=3)
