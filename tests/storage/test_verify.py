"""Damage is found, named and never read as data."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import (
    DamagedDataError,
    DatasetError,
    RoutingSpec,
    Trace,
    TraceDataset,
    TraceWriter,
    repair_dataset,
    verify_dataset,
)
from storage.schema import to_table, trace_schema
from tests.storage.builders import SPEC, make_traces

STEP = "step-000000000"
PART = f"{STEP}/part-00000.parquet"
MANIFEST = f"{STEP}/_manifest.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with TraceWriter(tmp_path, SPEC) as writer:
        for step in (0, 1):
            writer.write(make_traces(step, 3), step=step)
            writer.commit(step)
    return tmp_path


def edit_manifest(root: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((root / MANIFEST).read_text())
    change(manifest)
    (root / MANIFEST).write_text(json.dumps(manifest))


def replace_part(root: Path, table: pa.Table) -> None:
    """Another valid Parquet file in place of the part, with a manifest that agrees in size and digest."""
    pq.write_table(table, root / PART)
    data = (root / PART).read_bytes()
    edit_manifest(root, lambda m: m["files"][0].update(bytes=len(data), sha256=sha256(data).hexdigest()))


def test_a_sound_dataset_has_no_problems(root: Path) -> None:
    assert TraceDataset(root).verify() == []


def test_no_dataset_is_not_damage(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no trace dataset"):
        verify_dataset(tmp_path)


def read_or_refusal(root: Path) -> list[Trace] | str:
    try:
        return list(TraceDataset(root).iter(0))
    except DatasetError as error:
        return str(error)


@pytest.mark.parametrize("stride", [193, pytest.param(23, marks=pytest.mark.full)])
def test_every_flipped_byte_is_found_and_none_is_read_as_data(root: Path, stride: int) -> None:
    good = (root / PART).read_bytes()
    refused = 0
    for position in range(0, len(good), stride):
        bad = bytearray(good)
        bad[position] ^= 0xFF
        (root / PART).write_bytes(bad)
        assert verify_dataset(root)[0] == f"{root / PART}: its sha256 is not the one in its manifest"
        result = read_or_refusal(root)
        if isinstance(result, str):
            assert result.startswith(str(root / PART))
            refused += 1
        else:  # a byte of the statistics, which reading samples does not touch
            assert result == make_traces(0, 3), position
    assert refused > 2300 / stride


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_a_file_cut_short(root: Path, share: float) -> None:
    good = (root / PART).read_bytes()
    (root / PART).write_bytes(good[: int(share * len(good))])
    problems = verify_dataset(root)
    assert problems[0] == f"{root / PART}: has {int(share * len(good))} bytes, its manifest says {len(good)}"
    for read in (lambda ds: list(ds.iter(0)), lambda ds: ds["run/0/1/0"], lambda ds: ds.to_arrow(0)):
        with pytest.raises(DamagedDataError, match=r"part-00000\.parquet is damaged"):
            read(TraceDataset(root))
    assert list(TraceDataset(root).iter(1)) == make_traces(1, 3)  # the other step is as good as before


def test_a_missing_file(root: Path) -> None:
    (root / PART).unlink()
    assert verify_dataset(root) == [f"{root / PART}: is missing"]
    with pytest.raises(DamagedDataError, match=r"part-00000\.parquet"):
        list(TraceDataset(root))


def test_a_file_that_agrees_with_its_manifest_but_not_with_its_crc(root: Path) -> None:
    table = to_table(make_traces(0, 3), SPEC)
    index = table.column_names.index("logprobs")
    replace_part(root, table.set_column(index, table.field(index), table["logprobs"].take([1, 0, 2])))
    assert verify_dataset(root) == [
        f"{root / PART}: trace 'run/0/{sample}/0': its crc32 is not that of its tokens, logprobs and routes"
        for sample in (0, 1)
    ]


def test_ids_out_of_range(root: Path) -> None:
    wide = RoutingSpec.uniform(num_sites=3, num_experts=256, top_k=2)
    traces = make_traces(0, 3)
    traces[1].routed_experts[4, 2, 0] = 99
    replace_part(root, to_table(traces, wide).replace_schema_metadata(trace_schema(SPEC).metadata))
    (problem,) = verify_dataset(root)
    assert problem.startswith(f"{root / PART}: trace 'run/0/1/0': site 2 (site.2) has an id in [")
    assert "99], need [0, 16)" in problem


def test_rows_against_the_row_rule(root: Path) -> None:
    table = to_table(make_traces(0, 3), SPEC)
    index = table.column_names.index("route_start")
    replace_part(root, table.set_column(index, table.field(index), pa.array([0, 0, 2], pa.int32())))
    (problem,) = verify_dataset(root)
    assert "trace 'run/0/2/0': rows 2..8 for 7 tokens; the rows must end at 6" in problem


def test_another_models_file(root: Path) -> None:
    other = RoutingSpec.uniform(num_sites=3, num_experts=17, top_k=2)
    replace_part(root, to_table(make_traces(0, 3), other))
    (problem,) = verify_dataset(root)
    assert "num_experts=16" in problem
    assert "num_experts=17" in problem


def test_a_sample_in_two_steps(root: Path) -> None:
    shutil.copytree(root / STEP, root / "step-000000002")
    manifest = root / "step-000000002/_manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 0', '"step": 2'))
    problems = verify_dataset(root)
    assert f"{root / 'step-000000002'}: sample 'run/0/1/0' is in step 0 too" in problems


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["files"][0].update(path="../step-000000001/part-00000.parquet"), "is not a part file"),
        (lambda m: m["files"][0].update(path="/etc/passwd"), "path '/etc/passwd' is not a part file"),
        (lambda m: m["files"][0]["sample_ids"].pop(), "has 3 rows and 2 sample_ids"),
        (lambda m: m.update(samples=4), "counts 4 samples and lists 3"),
        (lambda m: m.update(step=5), "it is the manifest of step 5"),
        (lambda m: m.pop("files"), "KeyError: 'files'"),
        (lambda m: m.update(format_version="2"), "format_version '2'"),
    ],
)
def test_a_manifest_that_lies(root: Path, change: Callable[[dict], object], message: str) -> None:
    edit_manifest(root, change)
    (problem,) = verify_dataset(root)
    assert problem.startswith(str(root / MANIFEST))
    assert message in problem
    with pytest.raises(DamagedDataError, match=r"_manifest\.json"):
        len(TraceDataset(root))


def test_a_manifest_with_another_order_of_samples(root: Path) -> None:
    edit_manifest(root, lambda m: m["files"][0]["sample_ids"].reverse())
    assert verify_dataset(root) == [f"{root / PART}: its sample_ids are not those in its manifest"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format_version": "1"}', '{"format_version": "1", "routing_spec": 3}']
)
def test_a_damaged_dataset_file(root: Path, text: str) -> None:
    (root / "_dataset.json").write_text(text)
    (problem,) = verify_dataset(root)
    assert "_dataset.json" in problem
    with pytest.raises(DamagedDataError, match=r"_dataset\.json"):
        TraceDataset(root)


def test_strays(root: Path) -> None:
    (root / STEP / "copy.parquet").write_bytes(b"")
    (root / "step-000000009").mkdir()
    assert verify_dataset(root) == [
        f"{root / STEP / 'copy.parquet'}: is not in the manifest",
        f"{root / 'step-000000009'}: has no _manifest.json; restore it, or remove the directory",
    ]


def test_a_row_of_another_step(root: Path) -> None:
    traces = make_traces(0, 3)
    traces[2].step = 1
    replace_part(root, to_table(traces, SPEC))
    assert verify_dataset(root) == [f"{root / PART}: row 2 is of step 1, its manifest says 0"]


def test_repair_removes_what_was_never_committed_and_nothing_else(root: Path) -> None:
    dead = root / "_staging" / f"000000001-{os.uname().nodename}-{'0' * 32}"
    dead.mkdir()
    (dead / "part-00000.staging").write_bytes(b"half")
    (root / PART).write_bytes(b"damaged")
    before = {path: path.read_bytes() for path in root.glob("step-*/*")}
    assert len(verify_dataset(root)) == 3
    assert repair_dataset(root) == [str(dead)]
    assert {path: path.read_bytes() for path in root.glob("step-*/*")} == before
    assert len(verify_dataset(root)) == 2
    assert repair_dataset(root) == []


def test_an_annotation_of_a_foreign_sample(root: Path) -> None:
    TraceDataset(root).annotate(0, {"run/0/0/0": {"reward": 1.0}})
    (root / "_annotations/step-000000000").rename(root / "_annotations/step-000000001")
    path = root / "_annotations/step-000000001/000000000.json"
    assert verify_dataset(root) == [f"{path}: ValueError: it annotates step 0"]


def test_what_a_cut_off_compaction_left(root: Path) -> None:
    shutil.copytree(root / STEP, root / "kept")
    TraceDataset(root).compact()
    (root / "kept").rename(root / STEP)
    (problem,) = verify_dataset(root)
    assert problem.startswith(f"{root / STEP}: left by a compaction or a drop that was cut off")
    assert list(TraceDataset(root)) == make_traces(0, 3) + make_traces(1, 3)
    TraceDataset(root).compact()
    assert verify_dataset(root) == []
