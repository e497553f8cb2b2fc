"""A dataset travels to spawned workers; one in an object store says so where it cannot."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from storage import Trace, TraceDataset
from storage.object_store import ObjectStore
from tests.storage.builders import SPEC, commit, make_traces


def first_id(traces: list[Trace]) -> str:
    return traces[0].sample_id


def test_what_arrives_shows_the_same_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(tmp_path / "traces", 0, 3)
    monkeypatch.chdir(tmp_path)
    dataset = TraceDataset("traces")
    dataset.annotate(3, {"run/3/0/0": {"reward": 2.0}})
    assert "run/3/0/0" in dataset  # a manifest and the index are in memory
    data = pickle.dumps(dataset)
    commit(tmp_path / "traces", 4)
    monkeypatch.chdir("/")
    arrived = pickle.loads(data)
    assert (arrived.root, arrived.spec, arrived.steps, len(arrived)) == (tmp_path / "traces", SPEC, [0, 3], 10)
    assert list(arrived.iter(0)) == make_traces(0)
    assert arrived["run/3/0/0"].reward == 2.0
    arrived.refresh()
    assert arrived.steps == [0, 3, 4]


def test_credentials_stay_and_the_url_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "the-name")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-tell")
    data = pickle.dumps(ObjectStore.from_url("s3://bucket/traces"))
    assert b"do-not-tell" not in data
    assert pickle.loads(data).url("x") == "s3://bucket/traces/x"


def test_what_lies_in_memory_stays_there() -> None:
    pytest.importorskip("obstore")
    with pytest.raises(TypeError, match="memory: lies in the memory of this process and cannot be pickled"):
        pickle.dumps(ObjectStore.from_url("memory:///"))


def test_a_fork_of_a_process_with_an_object_store_is_refused() -> None:
    pytest.importorskip("obstore")
    store = ObjectStore.from_url("memory:///")
    store.create("step-000000000/x", b"four")
    file = store.open("step-000000000/x")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        for use in (store.committed, lambda: store.read("step-000000000/x"), lambda: file.read(4)):
            try:
                use()
                os.write(writing, b"it worked\n")
            except RuntimeError as error:
                os.write(writing, f"{error}\n".encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.readlines()
    assert len(lines) == 3
    for line in lines:
        assert line.startswith(f"memory: was opened by process {os.getpid()}, of which this one, {child}, is a fork")
        assert 'multiprocessing_context="spawn"' in line
    assert file.read(4) == b"four"


def loaded(dataset: TraceDataset, method: str) -> list[str]:
    from torch.utils.data import DataLoader

    return list(
        DataLoader(dataset.torch(), batch_size=1, num_workers=2, collate_fn=first_id, multiprocessing_context=method)
    )


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked(tmp_path: Path, method: str) -> None:
    commit(tmp_path, 0, 3)
    expected = [f"run/{step}/{sample}/0" for step in (0, 3) for sample in range(5)]
    assert sorted(loaded(TraceDataset(tmp_path), method)) == expected


@pytest.mark.full
def test_workers_of_an_object_store(url: str) -> None:
    commit(url, 0, 3)
    assert list(pickle.loads(pickle.dumps(TraceDataset(url)))) == make_traces(0) + make_traces(3)
    expected = [f"run/{step}/{sample}/0" for step in (0, 3) for sample in range(5)]
    assert sorted(loaded(TraceDataset(url), "spawn")) == expected
    with pytest.raises(RuntimeError, match=r'is a fork.*multiprocessing_context="spawn"'):
        loaded(TraceDataset(url), "fork")


RAY = """
import ray, sys
from storage import TraceDataset
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
count = ray.remote(lambda dataset: [t.sample_id for t in dataset])
print(len(ray.get(count.remote(TraceDataset(sys.argv[1])))))
"""


@pytest.mark.full
def test_a_ray_task_takes_a_dataset(tmp_path: Path) -> None:
    commit(tmp_path, 0)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.check_output([sys.executable, "-c", RAY, str(tmp_path)], text=True, env=environment) == "5\n"
