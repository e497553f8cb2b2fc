"""Datasets in S3, over HTTP, against a server process on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage import (
    DuplicateSampleError,
    StepExistsError,
    TraceDataset,
    TraceWriter,
    repair_dataset,
    verify_dataset,
)
from storage.catalog import Catalog
from storage.joint_writer import JointWriter
from storage.object_place import ObjectPlace
from storage.object_store import ObjectStore
from storage.open_folder import OpenFolder
from storage.schema import to_table
from storage.store import open_store
from storage.summary import summarise
from tests.storage.builders import SPEC, make_trace, make_traces


def commit(url: str, *steps: int) -> None:
    with TraceWriter(url, SPEC) as writer:
        for step in steps:
            writer.write(make_traces(step), step=step)
            writer.commit(step)


def test_it_is_a_dataset_like_any_other(url: str) -> None:
    commit(url, 0, 3)
    dataset = TraceDataset(url)
    assert (dataset.spec, dataset.steps, len(dataset)) == (SPEC, [0, 3], 10)
    assert list(dataset) == make_traces(0) + make_traces(3)
    assert dataset["run/3/4/0"] == make_traces(3)[4]
    dataset.annotate(3, {"run/3/0/0": {"reward": 2.0}})
    assert dataset.to_arrow(3, columns=["reward"])["reward"].to_pylist() == [2.0, None, None, None, None]
    assert open_store(url).read("README.md").startswith(b"---\nconfigs:")
    assert open_store(url).read("run.json").startswith(b'{\n "format_version": "1"')
    dataset.build_index()
    assert (len(TraceDataset(url)), dataset.verify()) == (10, [])
    dataset.compact()
    assert (dataset.steps, [t.sample_id for t in dataset][:2]) == ([0, 3], ["run/0/0/0", "run/0/1/0"])
    expected = list(dataset)
    (archive,) = dataset.archive(before=4)
    assert (list(TraceDataset(url)), dataset.verify()) == (expected, [])
    assert [name for name in open_store(url).names() if name.startswith("pack-")] == [archive]
    dataset.keep_from(3)
    assert (dataset.steps, len(TraceDataset(url)), dataset.verify()) == ([3], 5, [])


def test_figures_count_the_bytes_of_objects(url: str) -> None:
    commit(url, 0, 3)
    store = open_store(url)
    sizes = [
        store.size(f"{step}/{name}") for step in ("step-000000000", "step-000000003") for name in store.names(step)
    ]
    manifests = [store.size(f"{step}/_manifest.json") for step in ("step-000000000", "step-000000003")]
    assert summarise(TraceDataset(url))["bytes"] == sum(sizes) - sum(manifests) > 1000


def test_nothing_is_visible_before_the_manifest_and_nothing_stays_of_what_was_dropped(url: str) -> None:
    with TraceWriter(url, SPEC, max_part_bytes=1) as writer:
        writer.write(make_traces(0, 40), step=0)
        names = open_store(url).names("step-000000000")
        assert [name[:11] for name in names] == ["part-00000-", "part-00001-", "part-00002-"]
        assert TraceDataset(url).steps == []
    assert open_store(url).names("step-000000000") == []


def test_what_is_refused(url: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"no trace dataset at s3://traces/"):
        TraceDataset(url)
    commit(url, 0)
    with TraceWriter(url, SPEC) as writer:
        with pytest.raises(StepExistsError, match="step 0 is committed in s3://traces/"):
            writer.write(make_traces(0), step=0)
        with pytest.raises(DuplicateSampleError, match="'run/0/0/0' is committed in step 0"):
            writer.write([make_trace(1, 0, sample_id="run/0/0/0")], step=1)


def test_of_committers_that_race_exactly_one_wins(url: str) -> None:
    TraceWriter(url, SPEC).close()
    barrier, results = threading.Barrier(4), []

    def race(sample: int) -> None:
        with TraceWriter(url, SPEC) as writer:
            writer.write([make_trace(0, sample)], step=0)
            barrier.wait()
            try:
                writer.commit(0)
                results.append(sample)
            except StepExistsError:
                results.append(None)

    threads = [threading.Thread(target=race, args=(sample,)) for sample in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = set(results) - {None}
    assert results.count(None) == 3
    assert list(TraceDataset(url)) == [make_trace(0, winner)]
    assert TraceDataset(url).verify() == []


def test_the_parts_of_two_writers_are_one_commit(url: str) -> None:
    with JointWriter(url, SPEC) as first, JointWriter(url, SPEC) as helper:
        first.write([make_trace(0, 0)], step=0)
        for step in (0, 1):
            helper.write([make_trace(step, 1)], step=step)
        parts = [helper.hand_over(step) for step in (0, 1)]
        assert TraceDataset(url).steps == []
        first.take_over(parts[:1], step=0)
        first.commit(0)
        helper.release(0)
        helper.abandon(1)
    assert list(TraceDataset(url)) == [make_trace(0, 0), make_trace(0, 1)]
    assert TraceDataset(url).verify() == []
    assert len(open_store(url).names("step-000000001")) == 1  # somebody may have taken it over; litter, if not


def test_of_two_that_found_the_step_free_the_second_is_refused(url: str) -> None:
    commit(url, 0)
    store = ObjectStore.from_url(url)
    folders = []
    for sample in (0, 1):
        folders.append(OpenFolder(ObjectPlace(store, "step-000000001"), SPEC, 1 << 20))
        folders[-1].write(to_table([make_trace(1, sample)], SPEC))
        folders[-1].seal([(1, 1)])
    folders[1].publish()
    with pytest.raises(FileExistsError, match="already there"):
        folders[0].publish()
    folders[0].remove()
    assert list(TraceDataset(url).iter(1)) == [make_trace(1, 1)]
    assert len(store.names("step-000000001")) == 2  # a part and the manifest
    assert TraceDataset(url).verify() == []


def test_a_helper_that_was_never_told_of_the_commit_leaves_its_parts_alone(url: str) -> None:
    with JointWriter(url, SPEC) as first, JointWriter(url, SPEC) as helper:
        helper.write(make_traces(0), step=0)
        parts = helper.hand_over(0)
        assert parts is not None
        first.take_over([parts], step=0)
        first.commit(0)
        helper.abandon(0)  # the client was stopped, or `first` died, before it could say `release`
    assert list(TraceDataset(url)) == make_traces(0)
    assert TraceDataset(url).verify() == []


def test_steps_that_are_packed_between_two_pages_of_a_listing_are_not_missed(url: str) -> None:
    class Paged(ObjectStore):
        packed = False

        def _list(self, folder: str | None = None) -> Iterator[dict[str, Any]]:
            yield from (entry for entry in super()._list(folder) if entry["path"] < "q")
            if not self.packed:
                self.packed = True
                TraceDataset(url).compact()
            yield from (entry for entry in super()._list(folder) if entry["path"] >= "q")

    commit(url, 0, 3)
    store = Paged.from_url(url)
    assert Catalog(store).steps == [0, 3]


KILLED = """
import os, signal, sys
from storage import TraceWriter
from tests.storage.builders import SPEC, make_traces
with TraceWriter(sys.argv[1], SPEC) as writer:
    writer.write(make_traces(0), step=0)
    writer._open[0].seal([(0, 5)])
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_before_its_manifest_leaves_no_step(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", KILLED, url], env=environment, check=False)
    (litter,) = open_store(url).names("step-000000000")
    assert (TraceDataset(url).steps, list(TraceDataset(url))) == ([], [])
    assert (verify_dataset(url), repair_dataset(url)) == ([], [])  # it may be a writer at work
    with pytest.raises(ValueError, match="is an object store, whose parts carry no host"):
        repair_dataset(url, all_hosts=True)
    commit(url, 0)
    monkeypatch.setattr("storage.verify.LITTER_AGE_S", -10.0)
    assert repair_dataset(url) == [f"{url}/step-000000000/{litter}"]
    assert (list(TraceDataset(url)), verify_dataset(url)) == (make_traces(0), [])


def test_a_file_url_is_the_local_directory(tmp_path: Path) -> None:
    commit(f"file://{tmp_path}", 0)
    assert TraceDataset(f"file://{tmp_path}").root == tmp_path
    assert list(TraceDataset(tmp_path)) == make_traces(0)
    with pytest.raises(ValueError, match="nonsense://x is no URL of an object store"):
        TraceDataset("nonsense://x")
