"""The archive layout: the bytes that storage/FORMAT.md says, and readers that cannot tell it from the other."""

from __future__ import annotations

import dataclasses
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    DatasetError,
    DatasetInUseError,
    ReplayBatch,
    RoutingSpec,
    Site,
    Trace,
    TraceDataset,
    TraceWriter,
    repair_dataset,
)
from storage.archive import from_archive, to_archive
from storage.schema import to_table
from storage.staging import rewriting
from tests.storage.builders import SPEC, commit, make_trace, make_traces
from tests.storage.toy import TOY, holed_trace, long_trace, toy_trace

MIXED = RoutingSpec((Site("a", 0, 300, 3), Site("b", 1, 8, 1), Site("c", 4, 300, 2)))


def gated(step: int, sample: int) -> Trace:
    trace = make_trace(step, sample)
    return make_trace(step, sample, gate_weights=np.random.default_rng(sample).random(trace.routed_experts.shape))


def hard_traces(step: int) -> list[Trace]:
    """Full, gated, unrecorded, empty, begun late and holed rows side by side."""
    late = make_trace(step, 4)
    holes = np.arange(5) % 2 == 0
    return [
        make_trace(step, 0),
        gated(step, 1),
        make_trace(step, 2, routed_experts=None),
        make_trace(step, 3, completion=0, routed_experts=np.empty((0, 3, 2), np.uint8), finish_reason="abort"),
        make_trace(step, 4, routed_experts=late.routed_experts[2:], route_start=2),
        make_trace(
            step, 5, routed_experts=late.routed_experts[1:] * holes[:, None, None], route_start=1, route_valid=holes
        ),
    ]


def write(root: Path, spec: RoutingSpec, steps: dict[int, list[Trace]]) -> None:
    with TraceWriter(root, spec) as writer:
        for step, traces in steps.items():
            writer.write(traces, step=step)
            writer.commit(step)


def folders(root: Path) -> list[str]:
    return sorted(path.name[:24] for path in root.glob("*-*"))


def everything(dataset: TraceDataset) -> dict[str, Any]:
    """What each way of reading gives; Arrow tables as they are, so that every bit counts."""
    routed = pc.field("routed_experts").is_valid()
    return {
        "iter": list(dataset),
        "one step": [list(dataset.iter(step)) for step in dataset.steps],
        "by id": [dataset[trace.sample_id] for trace in dataset],
        "table": dataset.to_arrow(),
        "some columns": dataset.to_arrow(columns=["routed_experts", "sample_id"]),
        "gates": dataset.to_arrow(columns=["gate_weights"], filter=pc.field("step") == 1),
        "filtered by routes": dataset.to_arrow(columns=["sample_id"], filter=routed),
        "filtered, with routes": list(dataset.iter(filter=routed & (pc.field("step") > 0))),
        "filtered": list(dataset.iter(filter=pc.field("reward") > 0.5)),
        "torch": list(dataset.torch(shuffle_buffer=4, seed=3)),
        "rank 1": list(dataset.torch(rank=1, world_size=2)),
    }


def test_the_bytes_of_an_archive(tmp_path: Path) -> None:
    traces = [
        long_trace(),
        holed_trace(),
        dataclasses.replace(long_trace(), sample_id="unrecorded", routed_experts=None),
    ]
    write(tmp_path, TOY, {0: traces})
    (name,) = TraceDataset(tmp_path).archive(before=1)
    path = tmp_path / name / "part-00000.parquet"
    file = pq.ParquetFile(path)
    table = file.read()
    assert "routed_experts" not in table.column_names
    # rows [[0 1] [2 3]], [[1 2] [3 0]], [[3 1] [0 2]]: first the three rows of site 0, then those of site 1
    long, holed = b"\x00\x01\x01\x02\x03\x01", b"\x01\x02\x00\x00"
    assert table["routed_experts_by_site"].to_pylist() == [
        [long, b"\x02\x03\x03\x00\x00\x02"],
        [holed, b"\x03\x00\x00\x00"],
        None,
    ]
    assert table["gate_weights_by_site"].to_pylist() == [None, None, None]
    assert table.schema.metadata[b"moe_rollout.layout"] == b"archive"
    assert table.schema.metadata[b"moe_rollout.format_version"] == b"1"
    assert [table.schema.get_field_index(f"{name}_by_site") for name in ("routed_experts", "gate_weights")] == [7, 29]
    assert file.metadata.row_group(0).column(10).compression == "ZSTD"
    # of the token-major bytes, as in every other file
    assert table["crc32"].to_pylist() == to_table(traces, TOY)["crc32"].to_pylist()
    digest = sha256(path.read_bytes()).hexdigest()
    head = (
        '{\n "format_version": "1",\n "layout": "archive",\n "steps": [\n  [\n   0,\n   3\n  ]\n ],\n "samples": 3,\n'
    )
    manifest = (tmp_path / name / "_manifest.json").read_text()
    assert manifest.startswith(head)
    assert json.loads(manifest)["files"][0]["sha256"] == digest
    query = f"select sample_id, len(routed_experts_by_site) from '{tmp_path}/*-*/*.parquet'"
    assert duckdb.sql(query).fetchall() == [("long", 2), ("holed", 2), ("unrecorded", None)]


def test_gate_weights_lie_per_site_too(tmp_path: Path) -> None:
    weights = np.arange(8, dtype=np.float16).reshape(2, 2, 2)
    ids = [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]
    write(tmp_path, TOY, {0: [toy_trace("gated", [1, 2], [3], ids, gate_weights=weights)]})
    (name,) = TraceDataset(tmp_path).archive(before=1)
    (found,) = pq.read_table(tmp_path / name / "part-00000.parquet")["gate_weights_by_site"].to_pylist()
    assert found == [np.float16([0, 1, 4, 5]).tobytes(), np.float16([2, 3, 6, 7]).tobytes()]


@pytest.mark.parametrize("compacted", [False, True], ids=["steps", "packs"])
def test_readers_cannot_tell(tmp_path: Path, compacted: bool) -> None:
    write(tmp_path, SPEC, {step: hard_traces(step) for step in (0, 1, 2, 5)})
    TraceDataset(tmp_path).annotate(1, {"run/1/2/0": {"reward": 1.0, "judge": "v2"}})
    if compacted:
        TraceDataset(tmp_path).compact()
    dataset = TraceDataset(tmp_path)
    expected = everything(dataset)
    assert len(expected["filtered"]) == 1
    assert len(expected["filtered by routes"]) == 20
    dataset.archive(before=6)
    assert folders(tmp_path) == ["pack-000000000-000000005"]
    for reader in (dataset, TraceDataset(tmp_path)):
        assert everything(reader) == expected
        assert reader.verify() == []
    assert dataset.archive(before=6) == []
    assert dataset.compact() == []


def test_batches_of_a_wide_model_with_unequal_sites_are_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    traces = []
    for sample in range(20):  # more than a row group
        ids = np.zeros((6, 3, 3), np.uint16)
        for site, (_, _, experts, k) in enumerate(MIXED.sites):
            ids[:, site, :k] = rng.integers(0, experts, (6, k))
        traces.append(make_trace(0, sample, routed_experts=ids))
    write(tmp_path, MIXED, {0: traces})
    before = ReplayBatch.collate(list(TraceDataset(tmp_path)), spec=MIXED)
    TraceDataset(tmp_path).archive(before=1)
    after = ReplayBatch.collate(list(TraceDataset(tmp_path)), spec=MIXED)
    assert after.routed_experts.dtype == before.routed_experts.dtype == np.uint16
    assert (after.routed_experts == before.routed_experts).all()
    assert list(TraceDataset(tmp_path)) == traces


def test_what_reaches_the_limit_stays(tmp_path: Path) -> None:
    commit(tmp_path, *range(6))
    TraceDataset(tmp_path).archive(before=2)
    TraceDataset(tmp_path).compact()  # 2 to 5
    assert TraceDataset(tmp_path).archive(before=4) == []
    assert folders(tmp_path) == ["pack-000000000-000000001", "pack-000000002-000000005"]
    TraceDataset(tmp_path).archive(before=6)
    assert folders(tmp_path) == ["pack-000000000-000000001", "pack-000000002-000000005"]
    dataset = TraceDataset(tmp_path)
    assert list(dataset) == [trace for step in range(6) for trace in make_traces(step)]
    dataset.keep_from(3)
    assert (dataset.steps, dataset.verify(), folders(tmp_path)) == ([3, 4, 5], [], ["pack-000000002-000000005"])


def test_max_bytes_separates_archives(tmp_path: Path) -> None:
    commit(tmp_path, *range(4))
    size = (tmp_path / "step-000000000/part-00000.parquet").stat().st_size
    TraceDataset(tmp_path).archive(before=4, max_bytes=int(2.5 * size))
    assert folders(tmp_path) == ["pack-000000000-000000001", "pack-000000002-000000003"]
    TraceDataset(tmp_path).keep_from(0)
    commit(tmp_path, 4)
    TraceDataset(tmp_path).archive(before=9, max_bytes=10)  # a step alone, however large
    assert folders(tmp_path)[-1] == "pack-000000004-000000004"
    assert len(TraceDataset(tmp_path)) == 25


def test_a_pack_it_was_made_from_is_superseded(tmp_path: Path) -> None:
    """Cut off before the old pack was removed: the archive is read, verify tells, the next call removes the rest."""
    commit(tmp_path, 0, 1)
    (old,) = TraceDataset(tmp_path).compact()
    saved = {file.name: file.read_bytes() for file in (tmp_path / old).iterdir()}
    (new,) = TraceDataset(tmp_path).archive(before=2)
    for twin in (old, "pack-000000000-000000001-ffffffff", "pack-000000000-000000001-00000000"):
        (tmp_path / twin).mkdir()
        for name, data in saved.items():
            (tmp_path / twin / name).write_bytes(data)
    dataset = TraceDataset(tmp_path)
    assert list(dataset) == make_traces(0) + make_traces(1)
    assert sum("left by a compaction" in problem for problem in dataset.verify()) == len(dataset.verify()) == 3
    dataset.archive(before=2)
    assert [path.name for path in tmp_path.glob("pack-*")] == [new]


def test_other_readers_of_a_dataset_that_is_archived_in_part(tmp_path: Path) -> None:
    """They are never wrong in silence: what is not in a file is null when they ask for all files, or an error."""
    commit(tmp_path, 0, 1, 2)
    TraceDataset(tmp_path).archive(before=2)
    files = f"{tmp_path}/*-*/*.parquet"
    counted = "step, count(*), count(routed_experts), count(routed_experts_by_site)"
    query = f"select {counted} from read_parquet('{files}', union_by_name=true) group by step order by step"
    assert duckdb.sql(query).fetchall() == [(0, 5, 0, 5), (1, 5, 0, 5), (2, 5, 5, 0)]
    rows = polars.scan_parquet(files, missing_columns="insert", extra_columns="ignore").select("sample_id", "step")
    assert sorted(rows.collect()["step"].to_list()) == [0] * 5 + [1] * 5 + [2] * 5
    with pytest.raises(duckdb.BinderException, match='"routed_experts" not found'):
        duckdb.sql(f"select routed_experts from '{files}'").fetchall()


def archived(root: Path) -> Path:
    commit(root, 0)
    (name,) = TraceDataset(root).archive(before=1)
    return root / name


def test_damage_is_found_as_ever(tmp_path: Path) -> None:
    path = archived(tmp_path) / "part-00000.parquet"
    data = path.read_bytes()
    reported: list[str] = []
    for position in range(4, len(data) - 8, 397):
        bad = bytearray(data)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        assert TraceDataset(tmp_path).verify() != []
        try:
            found = list(TraceDataset(tmp_path))
        except DatasetError as error:
            found = make_traces(0)
            reported.append(str(error))
        assert found == make_traces(0)
    assert len(reported) > 5
    assert all(str(path) in text for text in reported)
    assert repair_dataset(tmp_path) == []


def test_a_layout_that_is_not_the_manifests_or_is_unknown(tmp_path: Path) -> None:
    pack = archived(tmp_path)
    manifest, part = pack / "_manifest.json", pack / "part-00000.parquet"
    good = manifest.read_text()
    manifest.write_text(good.replace(' "layout": "archive",\n', ""))
    assert TraceDataset(tmp_path).verify() == [f"{part}: its layout is not the one in its manifest"]
    manifest.write_text(good.replace('"archive"', '"rotated"'))
    with pytest.raises(DatasetError, match=r"layout 'rotated', this release of moe-rollout reads 'archive'"):
        TraceDataset(tmp_path)
    manifest.write_text(good)
    table = pq.read_table(part)
    pq.write_table(table.replace_schema_metadata(table.schema.metadata | {b"moe_rollout.layout": b"rotated"}), part)
    with pytest.raises(DatasetError, match=r"part-00000.parquet.*layout 'rotated'"):
        list(TraceDataset(tmp_path))


@pytest.mark.parametrize("values", [[b"\x01\x02"], [b"\x01", b"\x02"], [b"\x01\x02", b"\x01\x02\x03\x04"], []])
def test_lists_that_are_no_routes_are_refused(values: list[bytes]) -> None:
    table = to_archive(to_table([long_trace()], TOY), TOY)
    index = table.column_names.index("routed_experts_by_site")
    bad = table.set_column(index, table.field(index), pa.array([values], table.field(index).type))
    with pytest.raises(ValueError, match="need 2 of equal length, in rows of 2 bytes"):
        from_archive(bad, TOY)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.none() | st.integers(0, 5), max_size=20), start=st.integers(0, 3), k=st.integers(1, 3))
def test_there_and_back(lengths: list[int | None], start: int, k: int) -> None:
    spec = RoutingSpec.uniform(num_sites=4, num_experts=9, top_k=k)
    rng = np.random.default_rng(len(lengths))
    traces = [
        make_trace(
            0,
            number,
            prompt=0 if length is None else length,
            completion=1,
            routed_experts=None if length is None else rng.integers(0, 9, (length, 4, k)).astype(np.uint8),
        )
        for number, length in enumerate(lengths)
    ]
    table = to_table(traces, spec).slice(start)
    assert from_archive(to_archive(table, spec), spec).equals(table, check_metadata=True)


def test_a_second_archive_at_the_same_time_is_told_so(tmp_path: Path) -> None:
    commit(tmp_path, 0, 1)
    first, second = TraceDataset(tmp_path), TraceDataset(tmp_path)
    with rewriting(tmp_path), pytest.raises(DatasetInUseError, match="being compacted or archived by another"):
        first.archive(2)
    with rewriting(tmp_path), pytest.raises(DatasetInUseError):
        first.compact()
    assert len(second.archive(2)) == 1
    assert first.archive(2) == []  # its catalog was of before
    assert (first.steps, first.verify()) == ([0, 1], [])
