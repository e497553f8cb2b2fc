"""Several sinks: tables are spread over them, a step is still one commit, and each sample is in it once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
import ray

import actors
from actors.config import load_config
from actors.pipeline import run
from actors.sink import RemoteRecorder, Sink, SinkDiedError
from storage import TraceDataset
from storage.errors import DuplicateSampleError, StepExistsError
from tests.actors.chaos import Cluster, Driver, Reader
from tests.actors.fake_pipeline import fake_client
from tests.actors.fakes import SPEC
from tests.actors.test_pipeline import ENDLESS, assert_complete, write_run
from tests.actors.test_sink import remote, traces_of
from tests.actors.waiting import eventually

SINKS = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def recorder(cluster: None, root: Path) -> Iterator[RemoteRecorder]:
    recorder = actors.open_recorder(root, SPEC, num_sinks=SINKS)
    yield recorder
    recorder.close()


def pids(recorder: RemoteRecorder) -> list[int]:
    return ray.get([sink.__ray_call__.remote(lambda self: os.getpid()) for sink in recorder._sinks])


def write_one_by_one(recorder: RemoteRecorder, step: int, prompts: int = 6) -> list[str]:
    traces = traces_of(step, prompts)
    for trace in traces:
        recorder.write(remote([trace]), step)
    return [trace.sample_id for trace in traces]


def stored(root: Path) -> tuple[int, int]:
    return duckdb.sql(f"select count(*), count(distinct sample_id) from '{root}/*-*/*.parquet'").fetchall()[0]


@pytest.mark.full
def test_a_step_of_three_processes_appears_at_once(recorder: RemoteRecorder, root: Path) -> None:
    assert len(set(pids(recorder))) == SINKS
    ids = write_one_by_one(recorder, 0)
    other = write_one_by_one(recorder, 1)
    assert eventually(lambda: len(list((root / "_staging").iterdir())) == 2 * SINKS)
    assert recorder.taken_steps() == []
    assert recorder.commit(0) is True
    assert recorder.commit(0) is False
    assert recorder.taken_steps() == [0]
    assert len(list((root / "step-000000000").glob("*.parquet"))) == SINKS
    assert recorder.commit(1) is True
    dataset = TraceDataset(root)
    assert sorted(trace.sample_id for trace in dataset) == sorted(ids + other)
    assert stored(root) == (24, 24)
    assert dataset.verify() == []
    for trace in traces_of(0, 6):
        assert (dataset[trace.sample_id].routed_experts == trace.routed_experts).all()
    recorder.abandon(2)  # after this each sink has released what it handed over
    assert list((root / "_staging").iterdir()) == []


@pytest.mark.full
def test_a_sample_sent_to_two_sinks_is_refused_by_the_commit(recorder: RemoteRecorder, root: Path) -> None:
    (first, second, *_) = traces_of(0)
    for trace in (first, second, first):  # three sinks, one table each
        recorder.write(remote([trace]), 0)
    with pytest.raises(DuplicateSampleError, match=first.sample_id):
        recorder.commit(0)
    recorder.abandon(0)
    assert (recorder.taken_steps(), list((root / "_staging").iterdir())) == ([], [])
    write_one_by_one(recorder, 0)
    assert recorder.commit(0) is True
    assert stored(root) == (12, 12)


@pytest.mark.full
def test_a_step_that_another_writer_has_committed_is_refused_whole(recorder: RemoteRecorder, root: Path) -> None:
    write_one_by_one(recorder, 0)
    other = actors.open_recorder(root, SPEC)
    other.write(remote(traces_of(0, 1)), 0)
    other.commit(0)
    other.close()
    with pytest.raises(StepExistsError, match="step 0 is committed"):
        recorder.commit(0)
    recorder.abandon(0)
    assert list((root / "_staging").iterdir()) == []
    assert stored(root) == (2, 2)


class Slow(Sink):
    """A sink that takes half a second for each table."""

    def write(self, *arguments: Any) -> None:
        time.sleep(0.5)
        super().write(*arguments)


@pytest.mark.full
def test_three_slow_sinks_are_faster_than_one(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.sink.TraceSink", ray.remote(num_cpus=0)(Slow))
    seconds = []
    for number in (1, SINKS):
        recorder = actors.open_recorder(tmp_path / str(number), SPEC, num_sinks=number)
        begin = time.monotonic()
        write_one_by_one(recorder, 0)
        recorder.commit(0)
        seconds.append(time.monotonic() - begin)
        recorder.close()
        assert stored(tmp_path / str(number)) == (12, 12)
    assert seconds[0] > 6.0  # 12 tables, one after the other
    assert seconds[1] < 0.7 * seconds[0]


@pytest.mark.full
def test_the_pipeline_writes_through_several(cluster: None, tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, steps=3, milliseconds=20, extra="num_sinks = 2\n"))
    assert run(config, fake_client) == [0, 1, 2]
    assert_complete(config)
    files = [len(list(step.glob("*.parquet"))) for step in (tmp_path / "traces").glob("step-*")]
    assert max(files) == 2


@pytest.mark.full
@pytest.mark.parametrize("victim", range(SINKS))
def test_any_sink_that_is_killed_ends_the_step_and_the_rest_goes_on_elsewhere(
    recorder: RemoteRecorder, root: Path, victim: int
) -> None:
    write_one_by_one(recorder, 0)
    recorder.commit(0)
    write_one_by_one(recorder, 1)
    os.kill(pids(recorder)[victim], signal.SIGKILL)
    with pytest.raises(SinkDiedError, match=f"the actor that writes {root} died.*open the dataset again"):
        recorder.commit(1)
    assert TraceDataset(root).steps == [0]
    recorder.close()
    again = actors.open_recorder(root, SPEC, num_sinks=2)
    assert len(write_one_by_one(again, 1)) == 12
    again.commit(1)
    again.close()
    assert stored(root) == (24, 24)
    assert TraceDataset(root).verify() == []


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_killed_sinks_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    """One of three at a random moment, six times; the pipeline's process ends with it and is started again."""
    rng, cluster = random.Random(0), Cluster()
    options = {"milliseconds": 15, "extra": f"num_sinks = {SINKS}\n"}
    config = write_run(tmp_path, steps=ENDLESS, **options)
    traces = tmp_path / "traces"
    driver, reader = Driver(config, cluster.address, tmp_path / "driver.log"), Reader(traces)
    reader.start()
    kills = 0
    try:
        while kills < 6:
            driver.await_step(after=driver.committed())
            time.sleep(rng.uniform(0, 0.6))
            if sinks := cluster.workers("Sink"):
                os.kill(rng.choice(sinks), signal.SIGKILL)
                kills += 1
        driver.await_step(after=driver.committed())
        driver.kill()
        steps = driver.committed() + 10
        write_run(tmp_path, steps=steps, **options)
        driver.start()
        driver.await_end(steps)
        reader.assert_saw_whole_steps(looks=30)
    finally:
        driver.kill()
        reader.stop()
        cluster.close()
    assert driver.starts > 3
    assert max(len(list(step.glob("*.parquet"))) for step in traces.glob("step-*")) > 1
    assert_complete(load_config(config))
