"""Filters and scans against DuckDB, 10,000 steps, and bounded memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from storage import DamagedDataError, TraceDataset, TraceWriter
from storage.filters import may_match
from storage.index import Index
from tests.storage.builders import SPEC, make_trace


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of 40 samples; groups of 4, rewards 0 to 9, before step 3 some None, versions that follow the step."""
    path = tmp_path_factory.mktemp("scan")
    with TraceWriter(path, SPEC) as writer:
        for step in range(4):
            traces = [
                make_trace(
                    step,
                    sample,
                    group_id=f"{step}/{sample // 4}",
                    reward=None if sample % 7 == 0 and step < 3 else float(sample % 10),
                    weight_version=step // 2,
                    finish_reason="length" if sample % 3 == 0 else "stop",
                )
                for sample in range(40)
            ]
            writer.write(traces, step=step)
            writer.commit(step)
    return path


FILTERS = {
    "reward > 7": pc.field("reward") > 7,
    "finish_reason = 'length' and step >= 2": (pc.field("finish_reason") == "length") & (pc.field("step") >= 2),
    "weight_version = 1": pc.field("weight_version") == 1,
    "group_id in ('1/3', '3/0')": pc.field("group_id").isin(["1/3", "3/0"]),
    "reward is null": pc.field("reward").is_null(),
    "step > 99": pc.field("step") > 99,
    "reward is null or reward > 8": pc.field("reward").is_null() | (pc.field("reward") > 8),
    "not (reward > 3) and step < 3": ~(pc.field("reward") > 3) & (pc.field("step") < 3),
    "reward = 77 or step = 1": (pc.field("reward") == 77) | (pc.field("step") == 1),
}


@pytest.mark.parametrize("sql", FILTERS)
@pytest.mark.parametrize("annotated", [False, True])
def test_filters_agree_with_duckdb(root: Path, sql: str, annotated: bool) -> None:
    dataset = TraceDataset(root)
    query = f"select sample_id, reward from '{root}/step-*/*.parquet' where {sql} order by step, sample_id"
    expected = duckdb.sql(query).fetchall()
    facts = {f"run/{step}/0/0": {"note": "x"} for step in range(4)} if annotated else {}
    with mock.patch.object(dataset._sources.annotations, "of", return_value=facts):
        table = dataset.to_arrow(columns=["sample_id", "reward"], filter=FILTERS[sql])
        ids = [trace.sample_id for trace in dataset.iter(filter=FILTERS[sql])]
    rows = sorted(zip(*table.to_pydict().values(), strict=True), key=lambda row: (row[0].split("/")[1], row[0]))
    assert rows == sorted(expected, key=lambda row: (row[0].split("/")[1], row[0]))
    assert sorted(ids) == sorted(row[0] for row in expected)


# Of each column with statistics, a step, a value that no row has, and one that a row of the step has.
PUSHED = {
    "step": (3, 77, 3),
    "weight_version": (3, 77, 1),
    "reward": (3, 77.0, 3.0),
    "reward, where some have none": (2, 77.0, 3.0),
    "finish_reason": (3, "abort", "stop"),
    "group_id": (3, "9/0", "3/7"),
    "sample_id": (3, "zz", "run/3/7/0"),
}


@pytest.mark.parametrize("case", PUSHED)
def test_row_groups_that_statistics_exclude_are_not_read(root: Path, case: str) -> None:
    step, absent, present = PUSHED[case]
    part = root / f"step-{step:09d}/part-00000.parquet"
    good = part.read_bytes()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    part.write_bytes(b"PAR1" + bytes(footer - 4) + good[footer:])  # every page is damaged
    column = pc.field(case.partition(",")[0])
    try:
        dataset = TraceDataset(root)
        for excluded in (column == absent, column.isin([absent]), (column == absent) & (pc.field("seed") >= 0)):
            assert list(dataset.scan(filter=excluded)) == []
        for read in (column == present, (column == absent) | (pc.field("seed") >= 0)):
            with pytest.raises(DamagedDataError, match=rf"step-{step:09d}/part-00000\.parquet is damaged"):
                list(dataset.scan(step=step, filter=read))
    finally:
        part.write_bytes(good)


def test_what_may_match_by_hand() -> None:
    reward = pc.field("reward")
    schema = pa.schema([("reward", pa.float64()), ("step", pa.int64())])
    ranges = [(0.0, 3.0), (4.0, 9.0), None]
    for filter, expected in (
        (reward > 5, [False, True, True]),
        (~(reward > 5), [True, True, True]),
        (~(reward > 3), [True, False, True]),
        ((reward == 77) | reward.is_null(), [True, True, True]),
        ((reward > 5) | (pc.field("step") == 1), [True, True, True]),
        ((reward > 5) & (pc.field("step") == 1), [False, True, True]),
        (reward.is_valid(), [True, True, True]),
    ):
        assert may_match(filter, "reward", ranges, schema) == expected, filter


def test_several_steps_in_the_order_given(root: Path) -> None:
    dataset = TraceDataset(root)
    steps = [trace.step for trace in dataset.iter([2, 0])]
    assert steps == [2] * 40 + [0] * 40
    assert dataset.to_arrow(range(1, 3), columns=["step"])["step"].to_pylist() == [1] * 40 + [2] * 40


BIG = """
import resource, sys
import pyarrow as pa, numpy as np
from pathlib import Path
from storage import RoutingSpec, Trace, TraceDataset, TraceWriter

def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024

spec = RoutingSpec.uniform(num_sites=48, num_experts=128, top_k=8)
ids = np.random.default_rng(0).integers(0, 128, (3999, 48, 8), dtype=np.uint8)
def trace(n):
    return Trace(sample_id=f"run/0/{n}/0", step=0, prompt_ids=[1] * 2000, completion_ids=[2] * 2000,
                 logprobs=np.zeros(2000, np.float32), routed_experts=ids, finish_reason="stop")
before = peak()
with TraceWriter(sys.argv[1], spec, max_part_bytes=200 << 20) as writer:
    for n in range(0, 320, 4):
        writer.write([trace(n + i) for i in range(4)], step=0)
    writer.commit(0)
wrote = peak() - before
size = sum(f.stat().st_size for f in Path(sys.argv[1]).glob("step-*/*.parquet")) / 2**20
for batch in TraceDataset(sys.argv[1]).scan():
    pass
for t in TraceDataset(sys.argv[1]).iter():
    pass
arrow = pa.default_memory_pool().max_memory() / 2**20
print(f"{size:.0f} {wrote:.0f} {peak() - before:.0f} {arrow:.0f}")
"""


@pytest.mark.full
def test_a_step_larger_than_memory_is_written_and_scanned_in_a_few_row_groups(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_ARENA_MAX": "1"}
    out = subprocess.check_output([sys.executable, "-c", BIG, str(tmp_path)], text=True, env=environment)
    size, wrote, resident, arrow = map(int, out.split())
    assert size > 400  # MiB; a row group holds 25 MiB of routes, a part 200 MiB
    assert wrote < 130, out
    assert arrow < 130, out
    assert resident < 330, out  # what the allocator keeps beside it


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """10,000 steps of two samples whose part files are one and the same; the manifests are real."""
    path = tmp_path_factory.mktemp("many")
    with TraceWriter(path, SPEC) as writer:
        writer.write([make_trace(0, 0), make_trace(0, 1)], step=0)
        writer.commit(0)
    text = (path / "step-000000000/_manifest.json").read_text()
    for step in range(1, 10_000):
        folder = path / f"step-{step:09d}"
        folder.mkdir()
        manifest = text.replace('"step": 0', f'"step": {step}').replace("run/0/", f"run/{step}/")
        (folder / "_manifest.json").write_text(manifest)
    TraceDataset(path).build_index()
    return path


def test_ten_thousand_steps_open_without_reading_their_manifests(many: Path) -> None:
    with mock.patch("storage.catalog.read_manifest", side_effect=AssertionError("a manifest was read")):
        dataset = TraceDataset(many)
        assert (len(dataset), len(dataset.steps)) == (20_000, 10_000)
        assert "no/such/sample" not in dataset
    with mock.patch("storage.catalog.read_manifest", wraps=__import__("storage.catalog").catalog.read_manifest) as read:
        assert "run/0/1/0" in dataset
        assert dataset["run/0/1/0"] == make_trace(0, 1)
        assert read.call_count <= 2


def test_the_index_is_never_trusted_over_the_manifests(many: Path) -> None:
    manifest = many / "step-000000005/_manifest.json"
    good = manifest.read_text()
    try:
        manifest.write_text(good.replace("run/5/0/0", "run/5/zero/0"))
        dataset = TraceDataset(many)
        assert "run/5/zero/0" in dataset
        assert "run/5/0/0" not in dataset
    finally:
        manifest.write_text(good)


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_index_counts_as_absent(root: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    TraceDataset(root).build_index()
    path = root / "_index.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data) if damage is None else damage)
    dataset = TraceDataset(root)
    assert len(dataset) == 160
    assert "run/3/7/0" in dataset
    assert "_index.arrow is not used" in caplog.text
    path.unlink()


def test_hashes_that_collide_are_told_apart_by_the_manifests(root: Path) -> None:
    dataset = TraceDataset(root)
    dataset.build_index()
    with mock.patch("storage.index.sample_hash", return_value=2**64 - 1):
        index = Index.of({f: dataset._sources.catalog.manifest(f) for f in dataset._sources.catalog.folders}, {
            f: dataset._sources.catalog._stamps[f] for f in dataset._sources.catalog.folders
        })  # fmt: skip
        assert index.folders_with("anything") == dataset._sources.catalog.folders
        dataset._sources.catalog._index = index
        assert "foreign" not in dataset
        assert "run/2/5/0" in dataset
    (root / "_index.arrow").unlink()


def test_a_writer_that_closes_renews_the_index_of_many_steps(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        for step in range(70):
            writer.write([make_trace(step, 0)], step=step)
            writer.commit(step)
    with mock.patch("storage.catalog.read_manifest", side_effect=AssertionError("a manifest was read")):
        assert len(TraceDataset(tmp_path)) == 70
    with TraceWriter(tmp_path, SPEC) as writer, pytest.raises(ValueError, match="'run/3/0/0' is committed in step 3"):
        writer.write([make_trace(99, 1, sample_id="run/3/0/0")], step=99)


def test_batches_hold_few_rows(root: Path) -> None:
    assert max(batch.num_rows for batch in TraceDataset(root).scan()) <= 16
    assert isinstance(next(TraceDataset(root).scan(["step"])), pa.RecordBatch)
    assert np.sum([batch.num_rows for batch in TraceDataset(root).scan()]) == 160
