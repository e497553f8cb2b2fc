"""storage/FORMAT.md, byte by byte: the JSON texts, and refusals of newer versions."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from storage import DamagedDataError, DatasetError, RoutingSpec, Trace, TraceDataset, TraceWriter
from storage.manifest import Manifest, PartFile
from storage.retention import keep_from
from storage.store import LocalStore
from tests.storage.builders import ONE, routes

DATASET = """{
 "format_version": "1",
 "routing_spec": {
  "sites": [
   {
    "name": "site.0",
    "layer": 0,
    "num_experts": 16,
    "top_k": 1
   }
  ]
 }
}"""
MANIFEST = """{
 "format_version": "1",
 "step": 7,
 "samples": 2,
 "files": [
  {
   "path": "part-00000.parquet",
   "bytes": 9120,
   "sha256": "5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f5c0f",
   "rows": 2,
   "sample_ids": [
    "run/7/0-0/0",
    "run/7/0-0/1"
   ]
  }
 ]
}"""
PART = PartFile("part-00000.parquet", 9120, "5c0f" * 16, 2, ["run/7/0-0/0", "run/7/0-0/1"])


def trace(step: int = 7) -> Trace:
    return Trace(
        sample_id=f"run/{step}/0-0/0",
        step=step,
        prompt_ids=[5, 7],
        completion_ids=[9],
        logprobs=[-0.5],
        routed_experts=routes(3, 15),
        finish_reason="stop",
    )


def commit(root: Path, step: int = 7) -> None:
    with TraceWriter(root, ONE) as writer:
        writer.write([trace(step)], step=step)
        writer.commit(step)


def test_the_bytes_of_the_json_files(tmp_path: Path) -> None:
    TraceWriter(tmp_path, ONE).close()
    assert (tmp_path / "_dataset.json").read_text() == DATASET
    assert Manifest.of_step(7, [PART]).to_json() == MANIFEST
    assert Manifest.from_json(MANIFEST) == Manifest([PART], [(7, 2)])


def test_a_pack_lists_its_steps_and_says_where_each_lies() -> None:
    other = PartFile("part-00001.parquet", 1, "0" * 64, 2, ["c", "d"])
    pack = Manifest([PART, other], [(7, 1), (9, 3)])
    head, _ = pack.to_json().split(' "samples"')
    assert head == '{\n "format_version": "1",\n "steps": [\n  [\n   7,\n   1\n  ],\n  [\n   9,\n   3\n  ]\n ],\n'
    assert Manifest.from_json(pack.to_json()) == pack
    assert list(pack.extents(7)) == [(PART, 0, 1)]
    assert list(pack.extents(9)) == [(PART, 1, 2), (other, 0, 2)]


def test_an_annotation_carries_its_own_digest(tmp_path: Path) -> None:
    commit(tmp_path)
    TraceDataset(tmp_path).annotate(7, {"run/7/0-0/0": {"reward": 1.0}})
    text = '{"run/7/0-0/0": {"reward": 1.0}}'
    expected = {"format_version": "1", "step": 7, "sha256": sha256(text.encode()).hexdigest(), "samples": text}
    assert json.loads((tmp_path / "_annotations/step-000000007/000000000.json").read_text()) == expected


def test_the_retention_file(tmp_path: Path) -> None:
    commit(tmp_path)
    keep_from(LocalStore(tmp_path), 7)
    assert (tmp_path / "_retention.json").read_text() == '{"format_version": "1", "first_step": 7}'


def test_the_crc_and_the_ids_of_a_row(tmp_path: Path) -> None:
    commit(tmp_path)
    (row,) = pq.read_table(tmp_path / "step-000000007/part-00000.parquet").to_pylist()
    assert row["routed_experts"] == [b"\x03", b"\x0f"]
    # zlib.crc32 of int32 5 7 | int32 9 | float32 -0.5 | ids 3 15, little-endian
    assert row["crc32"] == 0x6FA9D8DF


@pytest.mark.parametrize(
    "file",
    ["_dataset.json", "step-000000007/_manifest.json", "_annotations/step-000000007/000000000.json", "_retention.json"],
)
def test_a_newer_version_is_refused_by_name(tmp_path: Path, file: str) -> None:
    commit(tmp_path)
    TraceDataset(tmp_path).annotate(7, {"run/7/0-0/0": {"reward": 1.0}})
    keep_from(LocalStore(tmp_path), 7)
    path = tmp_path / file
    path.write_text(path.read_text().replace('"format_version": "1"', '"format_version": "2"'))
    with pytest.raises(DatasetError, match=r"format_version '2', this release of moe-rollout reads '1'") as caught:
        list(TraceDataset(tmp_path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1), ("step", 7.0), ("step", True), ("samples", 10**30), ("samples", "2"),
    ],
)  # fmt: skip
def test_numbers_of_a_manifest_are_counts(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"need an integer from 0 on|it counts"):
        Manifest.from_json(json.dumps(json.loads(MANIFEST) | {field: value}))


@pytest.mark.parametrize(
    "path", ["../x/part-00000.parquet", "/etc/passwd", "a/part-00000.parquet", "part-00000.parquet\n", ""]
)
def test_a_path_is_a_bare_part_name(path: str) -> None:
    with pytest.raises(ValueError, match="is not a part file"):
        PartFile(path, 1, "0" * 64, 0, [])


def test_a_missing_dataset_and_a_foreign_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no trace dataset at"):
        TraceDataset(tmp_path)
    (tmp_path / "_dataset.json").write_text("hello")
    with pytest.raises(DamagedDataError, match=r"_dataset\.json"):
        TraceDataset(tmp_path)
    assert RoutingSpec.from_json(ONE.to_json()) == ONE
