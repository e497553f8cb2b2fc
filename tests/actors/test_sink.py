"""RemoteRecorder over Ray with the real writer: one commit per step, errors in their own words, bounded, crash-safe."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
import ray

import actors
from actors.finished import RemoteFinished
from actors.pool import ActorPool, Limits
from actors.sink import RemoteRecorder, Sink, SinkDiedError
from rollout.client import RolloutClient
from rollout.recorder import LocalRecorder
from rollout.sampling import SamplingParams
from storage import TraceDataset
from storage.errors import DuplicateSampleError, SpecMismatchError, StepExistsError
from storage.schema import to_table
from storage.trace import RoutingSpec, Trace
from tests.actors.fakes import SPEC, FakeBackend, InMemory, expected_trace, make_requests

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def recorder(root: Path) -> Iterator[RemoteRecorder]:
    recorder = actors.open_recorder(root, SPEC)
    yield recorder
    recorder.close()


def traces_of(step: int, prompts: int = 4) -> list[Trace]:
    return [expected_trace(request) for request in make_requests(prompts, 2, step=step)]


def remote(traces: list[Trace]) -> RemoteFinished:
    return RemoteFinished(ray.put(to_table(traces, SPEC)), [trace.sample_id for trace in traces])


def count(root: Path) -> int:
    query = f"select count(distinct sample_id) from '{root}/step-*/*.parquet'"
    return duckdb.sql(query).fetchall()[0][0]


def test_a_step_appears_with_its_commit_and_equals_what_was_sent(recorder: RemoteRecorder, root: Path) -> None:
    traces = traces_of(step=0)
    recorder.write(remote(traces[:5]), 0)
    recorder.write(InMemory(traces[5:]), 0, rewards={traces[7].sample_id: 0.5})
    assert recorder.taken_steps() == []
    recorder.commit(0)
    assert recorder.taken_steps() == [0]
    assert count(root) == 8
    stored = TraceDataset(root)
    assert stored.verify() == []
    for trace in traces:
        assert (stored[trace.sample_id].routed_experts == trace.routed_experts).all()
    assert [stored[t.sample_id].reward for t in traces[6:]] == [None, 0.5]


def test_tables_are_never_fetched_by_the_recorder(recorder: RemoteRecorder) -> None:
    class Unfetchable(RemoteFinished):
        def table(self):
            raise AssertionError("fetched")

    finished = remote(traces_of(step=0))
    recorder.write(Unfetchable(finished.ref, finished.sample_ids), 0)
    recorder.commit(0)
    assert recorder.taken_steps() == [0]


def test_a_trace_with_an_error_is_left_out(recorder: RemoteRecorder, root: Path) -> None:
    good, bad = traces_of(step=0)[:2]
    bad.finish_reason, bad.error = "error", "a failed step"
    recorder.write(remote([bad]), 0)
    assert recorder.commit(0) is False
    recorder.write(remote([good, bad]), 0)
    assert recorder.commit(0) is True
    assert [trace.sample_id for trace in TraceDataset(root)] == [good.sample_id]


def test_abandon_drops_a_step_and_leaves_others(recorder: RemoteRecorder, root: Path) -> None:
    for step in (0, 1):
        recorder.write(remote(traces_of(step)), step)
    recorder.abandon(0)
    recorder.commit(1)
    assert recorder.taken_steps() == [1]
    recorder.write(remote(traces_of(0)), 0)
    recorder.commit(0)
    assert count(root) == 16


def test_a_failed_write_fails_the_commit_again_and_again_until_abandoned(recorder: RemoteRecorder, root: Path) -> None:
    traces = traces_of(step=0)
    recorder.write(remote(traces[:3]), 0)
    recorder.write(remote(traces[2:]), 0)  # the third sample a second time
    for _ in range(2):
        with pytest.raises(DuplicateSampleError, match=traces[2].sample_id):
            recorder.commit(0)
    assert recorder.taken_steps() == []
    recorder.abandon(0)
    recorder.write(remote(traces), 0)
    recorder.commit(0)
    assert count(root) == 8


def test_the_next_write_raises_what_an_earlier_one_of_its_step_met(recorder: RemoteRecorder) -> None:
    traces = traces_of(step=0)
    recorder.write(remote(traces[:3]), 0)
    recorder.write(remote(traces[2:]), 0)  # the third sample a second time
    ray.wait(recorder._writes[0], num_returns=2, timeout=120)
    recorder.write(remote(traces_of(step=1)), 1)
    for _ in range(2):
        with pytest.raises(DuplicateSampleError, match=traces[2].sample_id):
            recorder.write(remote(traces[5:]), 0)
    recorder.commit(1)
    assert recorder.taken_steps() == [1]


class FullDisk(Sink):
    """A sink whose disk takes one table."""

    def write(self, *arguments: Any) -> None:
        if self._staged:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(*arguments)


def fake_client(root: Path, **options: Any) -> RolloutClient:
    pool = ActorPool("fake", num_cpus=0.5, engine_options=options, backend_factory=FakeBackend, limits=Limits(4, 2))
    return RolloutClient(pool, actors.open_recorder(root, SPEC))


def test_a_full_disk_ends_the_call_in_mid_step(root: Path, journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.sink.TraceSink", ray.remote(num_cpus=0)(FullDisk))
    with fake_client(root, journal=str(journal)) as client:
        with pytest.raises(OSError, match="No space left on device"):
            client.sample([[5, 20]] * 200, sampling_params=SamplingParams(seed=0))
        assert len(list(journal.glob("start-*"))) < 100
    assert TraceDataset(root).steps == []


def test_closing_the_client_ends_a_running_stream_as_closed(root: Path) -> None:
    client = fake_client(root)
    stream = client.stream([[5, 0], *[[5, 99]] * 60], sampling_params=SamplingParams(seed=0), step=0)
    next(stream)
    client.close()
    with pytest.raises(RuntimeError, match="the client was closed while step 0 was sampled; nothing was committed"):
        list(stream)
    assert TraceDataset(root).steps == []


def test_a_closed_recorder_says_so_and_has_nothing_to_abandon(recorder: RemoteRecorder) -> None:
    recorder.write(remote(traces_of(step=0)), 0)
    recorder.close()
    recorder.close()
    recorder.abandon(0)
    for use in (lambda: recorder.write(InMemory(traces_of(step=0)), 0), lambda: recorder.commit(0)):
        with pytest.raises(ValueError, match=r"this RemoteRecorder of .* is closed; open a new one"):
            use()


@pytest.mark.parametrize("open_recorder", [LocalRecorder, actors.open_recorder])
def test_commit_tells_whether_anything_was_staged_as_in_process(root: Path, open_recorder) -> None:
    good, bad = traces_of(step=0)[:2]
    bad.finish_reason, bad.error = "error", "a failed step"
    recorder = open_recorder(root, SPEC)
    assert recorder.commit(0) is False
    recorder.write(InMemory([bad]), 0)
    assert recorder.commit(0) is False
    recorder.write(InMemory([good]), 0)
    recorder.abandon(0)
    assert recorder.commit(0) is False
    recorder.write(InMemory([good, bad]), 0)
    assert recorder.commit(0) is True
    assert recorder.commit(0) is False
    assert recorder.taken_steps() == [0]
    recorder.close()


def test_a_committed_step_is_refused_in_the_writers_own_words(recorder: RemoteRecorder) -> None:
    recorder.write(remote(traces_of(0)), 0)
    recorder.commit(0)
    recorder.write(remote(traces_of(0)), 0)
    with pytest.raises(StepExistsError, match="step 0 is committed"):
        recorder.commit(0)


def test_another_models_dataset_is_refused_when_opening(recorder: RemoteRecorder, root: Path) -> None:
    other = RoutingSpec.uniform(num_sites=3, num_experts=16, top_k=2)
    with pytest.raises(SpecMismatchError, match="has 2 sites, the given one 3"):
        actors.open_recorder(root, other)


def test_writes_wait_when_the_sink_falls_behind(root: Path) -> None:
    recorder, gate = RemoteRecorder(root, SPEC, outstanding_writes=2), root.parent / "gate"
    tables = [_behind.remote(to_table([trace], SPEC), gate) for trace in traces_of(step=0)[:4]]
    recorder.write(RemoteFinished(tables[0], []), 0)
    recorder.write(RemoteFinished(tables[1], []), 0)
    third = threading.Thread(target=recorder.write, args=(RemoteFinished(tables[2], []), 0))
    third.start()
    third.join(0.5)
    assert third.is_alive()
    gate.touch()
    third.join(60)
    assert not third.is_alive()
    recorder.write(RemoteFinished(tables[3], []), 0)
    recorder.commit(0)
    assert count(root) == 4
    recorder.close()


@ray.remote(num_cpus=0)
def _behind(table, gate: Path):
    """The table, once the gate is there."""
    while not gate.exists():
        time.sleep(0.01)
    return table


def test_a_sink_that_died_says_so_and_committed_steps_are_intact(recorder: RemoteRecorder, root: Path) -> None:
    recorder.write(remote(traces_of(0)), 0)
    recorder.commit(0)
    recorder.write(remote(traces_of(1)), 1)
    ray.kill(recorder._sinks[0])
    with pytest.raises(SinkDiedError, match=f"the actor that writes {root} died.*open the dataset again"):
        recorder.commit(1)
    again = actors.open_recorder(root, SPEC)
    assert again.taken_steps() == [0]
    again.write(remote(traces_of(1)), 1)
    again.commit(1)
    again.close()
    assert count(root) == 16
    assert TraceDataset(root).verify() == []
