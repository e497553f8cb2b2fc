"""What is on disk before what: the durable operations of storage/FORMAT.md, in their order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from storage import Lease, TraceDataset, TraceWriter
from storage.joint_writer import JointWriter
from tests.storage.builders import SPEC, make_traces

Watch = Callable[[Path], list[str]]
STEP = "step-000000000"
CREATED = [
    "fsync _staging/dataset",
    "link _staging/dataset _dataset.json",
    "fsync .",
    "fsync _staging/file",
    "link _staging/file README.md",
    "fsync .",
    "fsync _staging/file",
    "link _staging/file run.json",
    "fsync .",
]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The calls that succeed from here on, with paths relative to a root; entries of staging by what they are."""

    def start(root: Path) -> list[str]:
        seen: list[str] = []

        def name(path: object) -> str:
            return re.sub(r"(_staging/\w+)-.+-[0-9a-f]{32}", r"\1", os.path.relpath(str(path), root))

        def patched(call: str, real: Callable[..., object]) -> Callable[..., object]:
            def run(*args: object, **kwargs: object) -> object:
                paths = [os.readlink(f"/proc/self/fd/{args[0]}")] if call == "fsync" else args[: 1 + (call != "mkdir")]
                result = real(*args, **kwargs)
                seen.append(" ".join([call, *(name(path) for path in paths)]))
                return result

            return run

        for call in ("fsync", "rename", "link", "mkdir"):
            monkeypatch.setattr(os, call, patched(call, getattr(os, call)))
        return seen

    return start


def test_the_commit_of_a_step(tmp_path: Path, watch: Watch) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        seen = watch(tmp_path)
        writer.commit(0)
    assert seen == [
        "fsync _staging/000000000/part-00000.staging",
        "fsync _staging/000000000/_manifest.json",
        "rename _staging/000000000/part-00000.staging _staging/000000000/part-00000.parquet",
        "fsync _staging/000000000",
        f"rename _staging/000000000 {STEP}",
        "fsync .",
    ]


def test_the_commit_of_what_two_writers_staged(tmp_path: Path, watch: Watch) -> None:
    with JointWriter(tmp_path, SPEC) as first, JointWriter(tmp_path, SPEC) as helper:
        first.write(make_traces(0)[:2], step=0)
        helper.write(make_traces(0)[2:], step=0)
        seen = watch(tmp_path)
        parts = helper.hand_over(0)
        assert parts is not None
        first.take_over([parts], step=0)
        first.commit(0)
        helper.release(0)
    assert seen == [
        "fsync _staging/000000000/part-00000.staging",  # the helper's
        "fsync _staging/000000000/part-00000.staging",
        "rename _staging/000000000/part-00000.staging _staging/000000000/part-00001.staging",
        "fsync _staging/000000000/_manifest.json",
        "rename _staging/000000000/part-00000.staging _staging/000000000/part-00000.parquet",
        "rename _staging/000000000/part-00001.staging _staging/000000000/part-00001.parquet",
        "fsync _staging/000000000",
        f"rename _staging/000000000 {STEP}",
        "fsync .",
    ]


def test_the_creation_of_a_dataset_and_of_the_directories_above_it(tmp_path: Path, watch: Watch) -> None:
    root = tmp_path / "runs" / "traces"
    seen = watch(root)
    TraceWriter(root, SPEC).close()
    assert seen == ["mkdir ..", "mkdir .", "fsync ..", "fsync ../..", "mkdir _staging", *CREATED]


def test_the_creation_of_a_dataset_whose_lease_was_there_first(tmp_path: Path, watch: Watch) -> None:
    root = tmp_path / "traces"
    seen = watch(root)
    with Lease(root, "me"):
        assert seen == ["mkdir .", "fsync .."]
        TraceWriter(root, SPEC).close()
    assert seen[2:] == ["mkdir _staging", *CREATED]


def test_annotations_and_their_directories(tmp_path: Path, watch: Watch) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        writer.commit(0)
    dataset = TraceDataset(tmp_path)
    seen = watch(tmp_path)
    for reward in (1.0, 2.0):
        dataset.annotate(0, {"run/0/0/0": {"reward": reward}})
    folder = f"_annotations/{STEP}"
    made = ["mkdir _annotations", f"mkdir {folder}"]
    synced = [f"fsync {folder}", "fsync _annotations", "fsync ."]
    first, second = (f"link _staging/file {folder}/00000000{number}.json" for number in (0, 1))
    assert seen == ["fsync _staging/file", *made, first, *synced, "fsync _staging/file", second, *synced]


def test_steps_are_dropped_for_readers_before_they_are_deleted(tmp_path: Path, watch: Watch) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        for step in (0, 1):
            writer.write(make_traces(step), step=step)
            writer.commit(step)
    dataset = TraceDataset(tmp_path)
    seen = watch(tmp_path)
    dataset.keep_from(1)
    assert seen == [
        "fsync _staging/file",
        "rename _staging/file _retention.json",
        "fsync .",
        f"rename {STEP} _staging/dropped",
        "fsync .",
    ]
