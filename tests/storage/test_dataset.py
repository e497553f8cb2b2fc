"""TraceDataset: the committed traces, and that other programs read the same files."""

from __future__ import annotations

import threading
from pathlib import Path

import duckdb
import numpy as np
import polars as pl
import pytest

from storage import RoutingSpec, Trace, TraceDataset, TraceWriter
from tests.storage.builders import SPEC, make_trace, make_traces


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with TraceWriter(tmp_path, SPEC) as writer:
        for step in (0, 2):
            writer.write(make_traces(step), step=step)
            writer.commit(step)
    return tmp_path


def test_reading(root: Path) -> None:
    dataset = TraceDataset(root)
    assert (dataset.spec, dataset.steps, len(dataset)) == (SPEC, [0, 2], 10)
    assert list(dataset.iter(step=2)) == make_traces(2)
    assert list(dataset) == make_traces(0) + make_traces(2)
    assert dataset["run/2/3/0"] == make_traces(2)[3]
    assert "run/2/3/0" in dataset
    assert "run/1/0/0" not in dataset


def test_what_is_not_there_is_named(root: Path) -> None:
    dataset = TraceDataset(root)
    with pytest.raises(KeyError, match="'run/9/9/9' is not among the 10 samples"):
        dataset["run/9/9/9"]
    with pytest.raises(ValueError, match=r"step 1 is not committed in .*; committed: \[0, 2\]"):
        list(dataset.iter(step=1))
    with pytest.raises(ValueError, match=r"no such columns: \['routes'\]"):
        dataset.to_arrow(columns=["routes"])
    with pytest.raises(FileNotFoundError, match=r"no trace dataset at .*elsewhere"):
        TraceDataset(root / "elsewhere")


def test_to_arrow(root: Path) -> None:
    table = TraceDataset(root).to_arrow(step=2, columns=["step", "sample_id"])
    assert table.column_names == ["step", "sample_id"]
    assert table.to_pylist() == [{"step": 2, "sample_id": f"run/2/{i}/0"} for i in range(5)]
    assert len(TraceDataset(root).to_arrow()) == 10


def test_an_empty_dataset(tmp_path: Path) -> None:
    TraceWriter(tmp_path, SPEC).close()
    dataset = TraceDataset(tmp_path)
    assert (len(dataset), list(dataset), len(dataset.to_arrow())) == (0, [], 0)


def test_reading_holds_one_row_group(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0, 64), step=0)
        writer.commit(0)
    traces = TraceDataset(tmp_path).iter()
    next(traces)
    part = tmp_path / "step-000000000/part-00000.parquet"
    part.write_bytes(part.read_bytes()[:5000])  # what was not read yet is gone
    with pytest.raises(ValueError, match=r"part-00000\.parquet is damaged"):
        list(traces)


def test_routes_read_from_disk_are_read_only_views(root: Path) -> None:
    routes = TraceDataset(root)["run/0/1/0"].routed_experts
    assert not routes.flags.writeable
    assert not routes.flags.owndata


def test_refresh_shows_what_was_committed_since(root: Path) -> None:
    dataset = TraceDataset(root)
    with TraceWriter(root, SPEC) as writer:
        writer.write(make_traces(3), step=3)
        writer.commit(3)
    assert dataset.steps == [0, 2]
    dataset.refresh()
    assert dataset.steps == [0, 2, 3]
    assert dataset["run/3/0/0"] == make_trace(3, 0, completion=2)


def test_readers_beside_a_writer_see_whole_steps(tmp_path: Path) -> None:
    def write() -> None:
        with TraceWriter(tmp_path, SPEC) as writer:
            for step in range(20):
                writer.write(make_traces(step), step=step)
                writer.commit(step)

    TraceWriter(tmp_path, SPEC).close()
    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        dataset = TraceDataset(tmp_path)
        assert len(list(dataset)) == 5 * len(dataset.steps)
        assert dataset.verify() == []
    thread.join()
    assert len(TraceDataset(tmp_path)) == 100


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """One sample of two prompt and two completion tokens, two sites, 300 experts, top-1: values known by hand."""
    spec = RoutingSpec.uniform(num_sites=2, num_experts=300, top_k=1)
    trace = Trace(
        sample_id="run/0/a/0",
        step=0,
        prompt_ids=[5, 7],
        completion_ids=[9, 2],
        logprobs=[-0.5, -0.25],
        routed_experts=np.array([[[1], [2]], [[3], [299]], [[0], [4]]]),
        finish_reason="stop",
        reward=1.5,
        metadata={"answer": 12},
    )
    with TraceWriter(tmp_path, spec) as writer:
        writer.write([trace], step=0)
        writer.commit(0)
    return tmp_path


def test_duckdb_reads_it_with_one_line(small: Path) -> None:
    rows = duckdb.sql(f"select * from '{small}/**/*.parquet'").to_arrow_table().to_pylist()
    assert len(rows) == 1
    assert rows[0]["completion_ids"] == [9, 2]
    assert rows[0]["logprobs"] == [-0.5, -0.25]
    assert rows[0]["routed_experts"] == [b"\x01\x00\x02\x00", b"\x03\x00\x2b\x01", b"\x00\x00\x04\x00"]
    assert rows[0]["weight_versions"] == [{"version": 0, "row_start": 0, "row_end": 3}]
    query = f"select len(routed_experts), reward, metadata->>'answer' from '{small}/**/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(3, 1.5, "12")]


def test_polars_reads_it_with_one_line(small: Path) -> None:
    frame = pl.read_parquet(f"{small}/**/*.parquet")
    assert frame["routed_experts"].to_list() == [[b"\x01\x00\x02\x00", b"\x03\x00\x2b\x01", b"\x00\x00\x04\x00"]]
    assert frame.select("sample_id", "reward", pl.col("prompt_ids").list.len()).rows() == [("run/0/a/0", 1.5, 2)]
