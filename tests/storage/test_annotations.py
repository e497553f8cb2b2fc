"""Facts that arrive after the commit: joined by every way of reading, never written into committed files."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow.compute as pc
import pytest

from storage import DamagedDataError, TraceDataset
from tests.storage.builders import commit, make_traces


def sample(number: int, step: int = 0) -> str:
    return f"run/{step}/{number}/0"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    commit(tmp_path, 0, 1)
    return tmp_path


def test_every_way_of_reading_joins_them(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.glob("step-*/*")}
    dataset = TraceDataset(root)
    dataset.annotate(0, {sample(1): {"reward": 2.5, "judge": {"name": "v2"}}})
    expected = make_traces(0)
    expected[1].reward, expected[1].metadata = 2.5, {"judge": {"name": "v2"}}
    for reader in (dataset, TraceDataset(root)):
        assert list(reader.iter(0)) == expected
        assert reader[sample(1)] == expected[1]
        assert list(reader) == expected + make_traces(1)
        table = reader.to_arrow(0, columns=["reward"])
        assert table.to_pydict() == {"reward": [None, 2.5, None, None, None]}
        assert [t.sample_id for t in reader.iter(filter=pc.field("reward") > 2)] == [sample(1)]
        assert reader.verify() == []
    assert {path: path.read_bytes() for path in root.glob("step-*/*")} == before


def test_the_later_annotation_wins_per_sample_and_key(root: Path) -> None:
    dataset = TraceDataset(root)
    dataset.annotate(0, {sample(0): {"reward": 1, "a": 1, "b": 1}, sample(1): {"reward": 1.0}})
    dataset.annotate(0, {sample(0): {"reward": 3.0, "b": 2}, sample(1): {"reward": None}})
    assert dataset[sample(0)].reward == 3.0
    assert dataset[sample(0)].metadata == {"a": 1, "b": 2}
    assert dataset[sample(1)].reward is None


def test_concurrent_annotators_lose_nothing(root: Path) -> None:
    threads = [
        threading.Thread(target=TraceDataset(root).annotate, args=(0, {sample(0): {str(number): number}}))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert TraceDataset(root)[sample(0)].metadata == {str(number): number for number in range(8)}
    assert len(list((root / "_annotations/step-000000000").iterdir())) == 8


@pytest.mark.parametrize(
    ("step", "facts", "message"),
    [
        (0, {sample(0, 1): {"reward": 1.0}}, r"step 0 of .* has no samples \['run/1/0/0'\] \(1 in all\)"),
        (5, {sample(0): {"reward": 1.0}}, "step 5 is not committed"),
        (0, {sample(0): {"reward": float("nan")}}, "reward is nan, need a finite number or None"),
        (0, {sample(0): {"reward": True}}, "reward is True"),
        (0, {sample(0): 1.0}, "need a dict such as"),
        (0, {sample(0): {"x": float("inf")}}, "not JSON compliant"),
    ],
)
def test_what_is_refused_leaves_nothing(root: Path, step: int, facts: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TraceDataset(root).annotate(step, facts)
    assert not (root / "_annotations").exists()


def test_a_damaged_annotation_is_named_and_never_joined(root: Path) -> None:
    TraceDataset(root).annotate(0, {sample(0): {"reward": 1.0}})
    path = root / "_annotations/step-000000000/000000000.json"
    path.write_text(path.read_text().replace("1.0", "9.0"))
    with pytest.raises(DamagedDataError, match=r"000000000\.json: ValueError: its sha256"):
        list(TraceDataset(root).iter(0))
    assert TraceDataset(root).verify() == [f"{path}: ValueError: its sha256 is not that of its samples"]
