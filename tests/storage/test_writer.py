"""TraceWriter: what is staged, what appears, what is refused."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import (
    DuplicateSampleError,
    FormatVersionError,
    RoutingSpec,
    SpecMismatchError,
    StepExistsError,
    TraceDataset,
    TraceWriter,
)
from storage.schema import to_table
from tests.storage.builders import SPEC, commit, make_trace, make_traces

NEW = ["README.md", "_dataset.json", "run.json"]


def files_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_layout_and_manifest(tmp_path: Path) -> None:
    commit(tmp_path, 7)
    part = tmp_path / "step-000000007/part-00000.parquet"
    manifest = json.loads((tmp_path / "step-000000007/_manifest.json").read_text())
    assert files_under(tmp_path) == [
        *NEW,
        "step-000000007/_manifest.json",
        "step-000000007/part-00000.parquet",
    ]
    assert manifest == {
        "format_version": "1",
        "step": 7,
        "samples": 5,
        "files": [
            {
                "path": "part-00000.parquet",
                "bytes": part.stat().st_size,
                "sha256": sha256(part.read_bytes()).hexdigest(),
                "rows": 5,
                "sample_ids": [f"run/7/{sample}/0" for sample in range(5)],
            }
        ],
    }
    assert json.loads((tmp_path / "_dataset.json").read_text()) == {
        "format_version": "1",
        "routing_spec": json.loads(SPEC.to_json()),
    }


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        assert list(tmp_path.rglob("*.parquet")) == []
        assert TraceDataset(tmp_path).steps == []
        writer.commit(step=0)
    assert list(TraceDataset(tmp_path).iter()) == make_traces(0)


def test_traces_and_tables_may_be_mixed_and_steps_interleaved(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0)[:2], step=0)
        writer.write(make_traces(5), step=5)
        writer.write(to_table(make_traces(0)[2:], SPEC), step=0)
        assert writer.next_step() == 6
        writer.commit(step=5)
        writer.commit(step=0)
        assert writer.committed_steps() == [0, 5]
    assert list(TraceDataset(tmp_path).iter()) == make_traces(0) + make_traces(5)


def test_row_groups_hold_at_most_16_samples_however_they_are_written(tmp_path: Path) -> None:
    traces = make_traces(0, 40)
    with TraceWriter(tmp_path, SPEC) as writer:
        for trace in traces[:20]:
            writer.write([trace], step=0)
        writer.write(to_table(traces[20:], SPEC), step=0)
        writer.commit(0)
    metadata = pq.ParquetFile(tmp_path / "step-000000000/part-00000.parquet").metadata
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [16, 16, 8]
    columns = {metadata.row_group(0).column(i).path_in_schema: i for i in range(metadata.num_columns)}
    routes = metadata.row_group(0).column(columns["routed_experts.list.element"])
    assert routes.compression == "ZSTD"
    assert not routes.is_stats_set
    assert "RLE_DICTIONARY" not in routes.encodings


def test_large_steps_are_split_into_parts(tmp_path: Path) -> None:
    traces = make_traces(0, 40)
    with TraceWriter(tmp_path, SPEC, max_part_bytes=1) as writer:
        writer.write(traces, step=0)
        writer.commit(0)
    parts = sorted(path.name for path in tmp_path.rglob("*.parquet"))
    assert parts == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    dataset = TraceDataset(tmp_path)
    assert list(dataset) == traces
    assert dataset["run/0/39/0"] == traces[39]


def test_an_exception_in_the_block_commits_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with TraceWriter(tmp_path, SPEC) as writer:
            writer.write(make_traces(0), step=0)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert files_under(tmp_path) == NEW


def test_leaving_without_a_commit_says_what_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(3), step=3)
    assert files_under(tmp_path) == NEW
    assert "dropping steps [3]" in caplog.text
    with pytest.raises(ValueError, match="closed"):
        writer.write(make_traces(3), step=3)


def test_abandon_drops_one_step(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        writer.write(make_traces(1), step=1)
        writer.abandon(0)
        writer.abandon(9)
        writer.write(make_traces(0)[:1], step=0)
        writer.commit(0)
    assert list(TraceDataset(tmp_path).iter()) == make_traces(0)[:1]


def test_a_committed_step_is_refused_early_and_says_how_to_go_on(tmp_path: Path) -> None:
    commit(tmp_path, 0)
    with TraceWriter(tmp_path, SPEC) as writer:
        for call in (lambda: writer.write([make_trace(0, 9)], step=0), lambda: writer.commit(0)):
            with pytest.raises(StepExistsError, match=r"step 0 is committed in .*; go on with step 1, or remove"):
                call()
    assert len(TraceDataset(tmp_path)) == 5


def test_repeated_samples_are_refused_and_the_step_stays_usable(tmp_path: Path) -> None:
    commit(tmp_path, 0)
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(1)[:2], step=1)
        for again in ([make_trace(1, 1)], [make_trace(1, 3), make_trace(1, 3)]):
            with pytest.raises(DuplicateSampleError, match=r"'run/1/[13]/0' was written to step 1 before"):
                writer.write(again, step=1)
        with pytest.raises(DuplicateSampleError, match="'run/0/2/0' is committed in step 0"):
            writer.write([make_trace(1, 7), make_trace(1, 2, sample_id="run/0/2/0")], step=1)
        writer.commit(1)
    assert list(TraceDataset(tmp_path).iter(step=1)) == make_traces(1)[:2]


def test_a_sample_another_writer_committed_meanwhile_is_refused_at_the_commit(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write([make_trace(1, 0, sample_id="run/0/2/0")], step=1)
        commit(tmp_path, 0)
        with pytest.raises(DuplicateSampleError, match="'run/0/2/0' is committed in step 0"):
            writer.commit(1)
    assert TraceDataset(tmp_path).steps == [0]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (make_trace(0, 1, finish_reason="error", error="boom"), r"'run/0/1/0' failed \(boom\)"),
        (make_trace(2, 1), "'run/2/1/0' is of step 2 and cannot be written to step 0"),
    ],
)
def test_what_does_not_belong_is_refused_before_anything_is_staged(tmp_path: Path, trace, message: str) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        for traces in ([make_trace(0, 0), trace], to_table([make_trace(0, 0), trace], SPEC)):
            with pytest.raises(ValueError, match=message):
                writer.write(traces, step=0)
        with pytest.raises(ValueError, match="nothing was written for step 0"):
            writer.commit(0)
    assert files_under(tmp_path) == NEW


def test_an_altered_table_is_refused(tmp_path: Path) -> None:
    table = to_table([make_trace()], SPEC)
    index = table.column_names.index("completion_ids")
    altered = table.set_column(index, table.field(index), pa.array([[1, 2, 3, 4]], table.field(index).type))
    with TraceWriter(tmp_path, SPEC) as writer, pytest.raises(ValueError, match="'run/0/0/0': its crc32"):
        writer.write(altered, step=0)


def test_an_empty_step_needs_an_explicit_write(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        with pytest.raises(ValueError, match="nothing was written for step 4"):
            writer.commit(4)
        writer.write([], step=4)
        writer.commit(4)
    dataset = TraceDataset(tmp_path)
    assert (dataset.steps, len(dataset), dataset.verify()) == ([4], 0, [])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RoutingSpec.uniform(num_sites=2, num_experts=16, top_k=2), "has 3 sites, the given one 2"),
        (RoutingSpec.uniform(num_sites=3, num_experts=32, top_k=2), r"at site 0 .*num_experts=16.*num_experts=32"),
    ],
)
def test_another_models_spec_is_refused_with_the_difference(tmp_path: Path, spec: RoutingSpec, message: str) -> None:
    commit(tmp_path, 0)
    with pytest.raises(SpecMismatchError, match=message):
        TraceWriter(tmp_path, spec)
    routes = np.zeros((6, *spec.row_shape), int)
    with TraceWriter(tmp_path, SPEC) as writer, pytest.raises(SpecMismatchError):
        writer.write(to_table([make_trace(1, 0, routed_experts=routes)], spec), step=1)


def test_a_newer_dataset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_dataset.json").write_text('{"format_version": "2", "routing_spec": {}}')
    with pytest.raises(FormatVersionError, match="format_version '2'"):
        TraceWriter(tmp_path, SPEC)
