"""Symbolic links lead neither readers nor writers out of a dataset."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from storage import DamagedDataError, Lease, TraceDataset, TraceWriter, repair_dataset, verify_dataset
from storage.retention import keep_from
from storage.staging import clean_staging
from storage.store import LocalStore
from tests.storage.builders import SPEC, commit, make_traces

STEP = "step-000000000"
ANNOTATIONS = f"_annotations/{STEP}"
READ = ["_dataset.json", "_retention.json", STEP, f"{STEP}/_manifest.json", f"{STEP}/part-00000.parquet"]
READ += ["_annotations", ANNOTATIONS, f"{ANNOTATIONS}/000000000.json"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "traces"
    commit(root, 0, 1)
    TraceDataset(root).annotate(0, {"run/0/0/0": {"reward": 1.0}})
    keep_from(LocalStore(root), 0)
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "traces")


def lead_out(root: Path, name: str) -> Path:
    """Put `name` outside of the dataset and a link in its place; where it lies now."""
    outside = root.parent / "outside"
    (root / name).rename(outside)
    (root / name).symlink_to(outside)
    return outside


def tree(path: Path) -> dict[str, int]:
    """Every file below `path` and when it was changed."""
    found = path.rglob("*") if path.is_dir() else [path]
    return {str(entry): entry.stat().st_mtime_ns for entry in found}


@pytest.mark.parametrize("name", READ)
def test_what_is_read_through_a_link_is_refused_and_reported(root: Path, name: str) -> None:
    outside = lead_out(root, name)
    before = tree(outside)
    problem = f"{root / name} is a symbolic link, which a dataset must not hold; put what it points to in its place"
    for read in (lambda: list(TraceDataset(root)), lambda: TraceDataset(root)["run/0/0/0"]):
        with pytest.raises(DamagedDataError, match="is a symbolic link, which a dataset must not hold") as caught:
            read()
        assert problem in str(caught.value)
    assert tree(outside) == before


def test_a_snapshot_in_the_hugging_face_cache_is_to_be_downloaded_elsewhere(made: Path, tmp_path: Path) -> None:
    """`snapshots/<commit>` holds directories, and for each file a relative link to `blobs/<digest>`."""
    repository = tmp_path / "datasets--me--traces"
    snapshot, blobs = repository / "snapshots" / "5c0f5c0f", repository / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in made.rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(made)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    remedy = r'symbolic link.*huggingface_hub\.snapshot_download\(.*, repo_type="dataset", local_dir="traces"\)'
    with pytest.raises(DamagedDataError, match=remedy) as caught:
        TraceDataset(snapshot)
    assert "put what it points to" not in str(caught.value)
    assert 'snapshot_download(REPOSITORY, repo_type="dataset", local_dir=' in (made / "README.md").read_text()
    assert verify_dataset(shutil.copytree(snapshot, tmp_path / "local")) == []  # what local_dir makes of it


@pytest.mark.parametrize("name", [*READ[1:], "_staging"])
def test_verify_names_each_link_once(root: Path, name: str) -> None:
    lead_out(root, name)
    dangling = root / "step-000000009"
    dangling.symlink_to(root / "nowhere")
    expected = sorted([str(root / name), str(dangling)])
    assert [problem.split(" is a symbolic link")[0] for problem in verify_dataset(root)] == expected


@pytest.mark.parametrize("name", ["_annotations", ANNOTATIONS, "_staging"])
def test_no_annotation_is_written_through_a_link(root: Path, name: str) -> None:
    dataset = TraceDataset(root)
    outside = lead_out(root, name)
    before = tree(outside)
    with pytest.raises(DamagedDataError, match=f"{name} is a symbolic link"):
        dataset.annotate(0, {"run/0/0/0": {"reward": 2.0}})
    assert tree(outside) == before


def test_no_step_is_staged_or_committed_through_a_link(root: Path) -> None:
    outside = lead_out(root, "_staging")
    with pytest.raises(DamagedDataError, match="_staging is a symbolic link"):
        TraceWriter(root, SPEC)
    (root / "_staging").unlink()
    with TraceWriter(root, SPEC) as writer:
        (root / "step-000000002").symlink_to(outside)
        with pytest.raises(DamagedDataError, match="step-000000002 is a symbolic link"):
            writer.write(make_traces(2), step=2)
        (root / "step-000000002").unlink()
        writer.write(make_traces(3), step=3)
        (root / "step-000000003").symlink_to(outside)
        with pytest.raises(DamagedDataError, match="step-000000003 is a symbolic link"):
            writer.commit(3)
    assert tree(outside) == {}


def test_no_file_is_replaced_through_a_link_and_no_lease_is_taken(root: Path) -> None:
    outside = lead_out(root, "_retention.json")
    text = outside.read_text()
    with pytest.raises(DamagedDataError, match=r"_retention\.json is a symbolic link"):
        LocalStore(root).replace("_retention.json", b"x")
    assert list((root / "_staging").iterdir()) == []
    (root / "_lease.json").symlink_to(outside)
    with pytest.raises(DamagedDataError, match=r"_lease\.json is a symbolic link"):
        Lease(root, "me")
    assert outside.read_text() == text


def test_a_link_in_staging_is_litter_and_its_target_stays(root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "mine").touch()
    link = root / "_staging" / f"000000007-{os.uname().nodename}-{'0' * 32}"
    link.symlink_to(outside)
    assert clean_staging(root) == [link]
    assert not link.is_symlink()
    assert (outside / "mine").exists()


def test_the_root_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    commit(link, 2)
    dataset = TraceDataset(link)
    dataset.annotate(2, {"run/2/0/0": {"reward": 3.0}})
    with Lease(link, "me"):
        assert (dataset["run/2/0/0"].reward, dataset.verify(), repair_dataset(link)) == (3.0, [], [])
    assert dataset.compact()
    assert (TraceDataset(root).steps, TraceDataset(root).verify()) == ([0, 1, 2], [])
