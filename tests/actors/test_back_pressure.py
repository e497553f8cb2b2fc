"""A sink that is slower than the engine slows the engine: what waits to be written is bounded, however long the run."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from actors.pool import ActorPool, Limits
from actors.sink import RemoteRecorder, Sink
from rollout.client import RolloutClient
from rollout.sampling import SamplingParams
from storage import TraceDataset
from tests.actors.fakes import SPEC, FakeBackend

REQUESTS, CHUNK, CHUNKS, WRITES = 200, 4, 2, 2


class Slow(Sink):
    """A sink that takes 30 ms for each table, and notes how many samples were begun that are not written yet."""

    def write(self, table: pa.Table, step: int, rewards: dict[str, float] | None) -> None:
        time.sleep(0.03)
        journal = Path(self._root).parent / "journal"
        written = len(list(journal.glob("written-*")))
        ahead = len(list(journal.glob("start-*"))) - written
        (journal / f"ahead-{ahead:03d}").touch()
        super().write(table, step, rewards)
        for number in range(table.num_rows):
            (journal / f"written-{written + number}").touch()


@pytest.mark.full
def test_a_slow_sink_slows_generation(
    cluster: None, tmp_path: Path, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that takes no time, 200 requests: one actor works on two chunks, two tables are on their way to the
    sink and one waits to be sent, so at most 4 x (2 + 2 + 1) samples are begun and not written."""
    monkeypatch.setattr("actors.sink.TraceSink", ray.remote(num_cpus=0)(Slow))
    pool = ActorPool(
        "fake",
        num_cpus=0.5,
        engine_options={"journal": str(journal)},
        backend_factory=FakeBackend,
        limits=Limits(CHUNK, CHUNKS),
    )
    recorder = RemoteRecorder(tmp_path / "traces", SPEC, outstanding_writes=WRITES)
    with RolloutClient(pool, recorder) as client:
        client.sample([[5, 0]] * REQUESTS, sampling_params=SamplingParams(seed=0))
    most = max(int(note.name.removeprefix("ahead-")) for note in journal.glob("ahead-*"))
    assert CHUNK < most <= CHUNK * (CHUNKS + WRITES + 1)
    assert len(list(journal.glob("written-*"))) == REQUESTS == len(TraceDataset(tmp_path / "traces"))
