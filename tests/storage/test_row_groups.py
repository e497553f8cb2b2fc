"""A few KB that stand for hundreds of MiB are refused before a page is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import DamagedDataError, TraceDataset, TraceWriter, verify_dataset
from storage.schema import to_table
from tests.storage.builders import SPEC, commit, make_traces

PART = "step-000000000/part-00000.parquet"
MIB = 1 << 20
READS: dict[str, Callable[[TraceDataset], object]] = {
    "iter": lambda dataset: list(dataset),
    "one": lambda dataset: dataset["run/0/0/0"],
    "scan": lambda dataset: dataset.to_arrow(),
    "columns": lambda dataset: dataset.to_arrow(columns=["text", "prompt_ids"]),
    "compact": lambda dataset: dataset.archive(before=1),
}


@contextmanager
def counted() -> Iterator[pa.MemoryPool]:
    """What Arrow allocates inside, counted from zero."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


def forge(root: Path, table: pa.Table, **options: object) -> int:
    """A dataset of this one part, in one row group, which agrees with its manifest; the bytes of the part."""
    commit(root, 0)
    pq.write_table(table, root / PART, row_group_size=len(table), compression="zstd", **options)
    data = (root / PART).read_bytes()
    manifest = json.loads((root / "step-000000000/_manifest.json").read_text())
    entry = {"bytes": len(data), "sha256": sha256(data).hexdigest(), "rows": len(table)}
    manifest["files"][0] |= entry | {"sample_ids": table["sample_id"].to_pylist()}
    manifest["samples"] = len(table)
    (root / "step-000000000/_manifest.json").write_text(json.dumps(manifest))
    return len(data)


def rows_of_text(count: int, size: int) -> pa.Table:
    """`count` rows whose `text` is `size` bytes, all the same and stored once."""
    table = to_table(make_traces(0, 1), SPEC).take([0] * count)
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), ["x" * size])
    index = table.column_names.index("text")
    ids = pa.array([f"run/0/{row}/0" for row in range(count)])
    return table.set_column(index, pa.field("text", text.type), text).set_column(0, table.field(0), ids)


def one_row_of_routes(count: int, size: int) -> pa.Table:
    """One row with `count` values of `routed_experts`, all the same `size` bytes and stored once."""
    table = to_table(make_traces(0, 1), SPEC)
    index = table.column_names.index("routed_experts")
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), [bytes(size)])
    return table.set_column(index, "routed_experts", pa.ListArray.from_arrays([0, count], values))


@pytest.mark.parametrize(("rows", "size"), [(400, MIB), (17, 8), (16, MIB)])
def test_equal_texts_that_are_stored_once(
    tmp_path: Path, rows: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.row_groups.SEVERAL_SAMPLES_BYTES", 16 * MIB)
    assert forge(tmp_path, rows_of_text(rows, size)) < 20_000
    with counted() as pool:
        for read in READS.values():
            with pytest.raises(DamagedDataError, match=r"part-00000\.parquet: row group 0 (has|may take) \d+"):
                read(TraceDataset(tmp_path))
        (problem,) = verify_dataset(tmp_path)
    assert problem.startswith(f"{tmp_path / PART}: row group 0 ")
    assert "restore it, or remove its step" in problem
    assert pool.max_memory() < 10 * MIB


def test_one_sample_of_routes_that_are_stored_once(tmp_path: Path) -> None:
    assert forge(tmp_path, one_row_of_routes(4000, MIB)) < 20_000  # 4 GB
    with counted() as pool:
        for read in (list, lambda dataset: dataset.to_arrow(columns=["routed_experts"])):
            with pytest.raises(DamagedDataError, match=r"may take \d+ bytes for 1 rows, the limit is 2147483648"):
                read(TraceDataset(tmp_path))
    assert pool.max_memory() < 10 * MIB


def test_a_few_equal_texts_are_data(tmp_path: Path) -> None:
    forge(tmp_path, rows_of_text(16, 1000))
    assert TraceDataset(tmp_path).to_arrow(columns=["text"])["text"].to_pylist() == ["x" * 1000] * 16


def test_the_writer_refuses_what_no_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.part.ONE_SAMPLE_BYTES", 2000)
    good, bad = make_traces(0, 2)
    bad.text = "x" * 2000
    with TraceWriter(tmp_path, SPEC) as writer:
        with pytest.raises(ValueError, match=r"sample 'run/0/1/0' has \d+ bytes, a row group holds 1875"):
            writer.write([good, bad], step=0)
        writer.write([good], step=0)
        writer.commit(0)
    assert list(TraceDataset(tmp_path)) == [good]
