"""A few KB that stand for hundreds of MiB are refused before a page is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import DamagedDataError, TraceDataset, TraceWriter, verify_dataset
from storage.page_headers import read_pages
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
    for read in READS.values():
        with pytest.raises(DamagedDataError, match=r"part-00000\.parquet: row group 0 (has|may take) \d+"):
            read(TraceDataset(tmp_path))
    (problem,) = verify_dataset(tmp_path)
    assert problem.startswith(f"{tmp_path / PART}: row group 0 ")
    assert "restore it, or remove its step" in problem


def test_one_sample_of_routes_that_are_stored_once(tmp_path: Path) -> None:
    assert forge(tmp_path, one_row_of_routes(4000, MIB)) < 20_000  # 4 GB
    for read in (list, lambda dataset: dataset.to_arrow(columns=["routed_experts"])):
        with pytest.raises(DamagedDataError, match=r"may take \d+ bytes for 1 rows, the limit is 2147483648"):
            read(TraceDataset(tmp_path))


MEASURED = """
import sys
import pyarrow as pa
from storage import DamagedDataError, TraceDataset, verify_dataset
for read in (list, lambda d: d["run/0/0/0"], lambda d: d.to_arrow(), lambda d: d.to_arrow(columns=["text"])):
    try:
        read(TraceDataset(sys.argv[1]))
        sys.exit("it was read")
    except DamagedDataError:
        pass
assert len(verify_dataset(sys.argv[1])) == 1
print(pa.default_memory_pool().max_memory())
"""


def test_refusing_it_costs_no_memory(tmp_path: Path) -> None:
    forge(tmp_path, rows_of_text(400, MIB))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    out = subprocess.check_output([sys.executable, "-c", MEASURED, str(tmp_path)], text=True, env=environment)
    assert int(out) < 10 * MIB


def test_a_few_equal_texts_are_data(tmp_path: Path) -> None:
    forge(tmp_path, rows_of_text(16, 1000))
    assert TraceDataset(tmp_path).to_arrow(columns=["text"])["text"].to_pylist() == ["x" * 1000] * 16


def test_the_writer_refuses_what_no_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.part.ONE_SAMPLE_BYTES", 2000)
    staged, bad, good = make_traces(0, 3)
    bad.text = "x" * 2000
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write([staged], step=0)
        for call in ([good, bad], to_table([good, bad], SPEC)):
            with pytest.raises(ValueError, match=r"sample 'run/0/1/0' has \d+ bytes, a row group holds 1875"):
                writer.write(call, step=0)
        writer.write([good], step=0)
        writer.commit(0)
    assert list(TraceDataset(tmp_path)) == [staged, good]


def test_a_footer_that_lies_about_encodings(tmp_path: Path) -> None:
    """One byte of it: PLAIN, RLE, RLE_DICTIONARY of `routed_experts`, 0 3 8 in zigzag, becomes PLAIN, RLE, PLAIN."""
    forge(tmp_path, one_row_of_routes(4000, MIB), use_dictionary=["routed_experts.list.element"])
    data = bytearray((tmp_path / PART).read_bytes())
    at = data.index(b"\x19\x35\x00\x06\x10", len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    data[at + 4] = 0
    (tmp_path / PART).write_bytes(data)
    found = pq.ParquetFile(tmp_path / PART).metadata.row_group(0).column(7)
    assert (found.path_in_schema, found.encodings) == ("routed_experts.list.element", ("PLAIN", "RLE", "PLAIN"))
    for read in (list, lambda dataset: dataset.to_arrow(columns=["routed_experts"])):
        with pytest.raises(DamagedDataError, match=r"may take \d+ bytes for 1 rows, the limit is 2147483648"):
            read(TraceDataset(tmp_path))
    assert "may take" in verify_dataset(tmp_path)[-1]


@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"data_page_size": 64}, {"compression": "none"}])
def test_page_headers_add_up_to_what_pyarrow_says(tmp_path: Path, options: dict) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(to_table(make_traces(0, 40), SPEC), path, row_group_size=16, write_page_checksum=True, **options)
    metadata = pq.ParquetFile(path).metadata
    for chunk in (metadata.row_group(g).column(i) for g in range(3) for i in range(metadata.num_columns)):
        with pa.OSFile(str(path)) as file:
            pages = read_pages(file, chunk)
        assert pages[:2] == (chunk.total_uncompressed_size, chunk.num_values), chunk.path_in_schema
        assert pages.repeats == chunk.has_dictionary_page


NO_HEADERS = {
    "types without end": b"\x1c" * 64,
    "a list without end": b"\x19\xf7" + b"\xff" * 9 + b"\x01",
    "a map": b"\x1b\x00",
    "a negative size": b"\x15\x00\x15\x01\x15\x02\x00",
    "no page": b"\x15\x00\x15\x02\x15\x02\x00",
    "a number for a page": b"\x15\x00\x15\x02\x15\x02\x25\x00\x00",
    "a flag for a type": b"\x11\x15\x02\x15\x02\x00",
}


@pytest.mark.parametrize("name", NO_HEADERS)
def test_what_is_no_page_header(tmp_path: Path, name: str) -> None:
    commit(tmp_path, 0)
    data, header = (tmp_path / PART).read_bytes(), NO_HEADERS[name]
    (tmp_path / PART).write_bytes(data[:4] + header + data[4 + len(header) :])
    with pytest.raises(DamagedDataError, match=r"part-00000\.parquet is damaged \(.*page header"):
        list(TraceDataset(tmp_path))
