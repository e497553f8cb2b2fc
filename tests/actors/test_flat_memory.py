"""Three hundred steps of large traces: neither the object store nor the sink grows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import ray

from actors.pool import ActorPool
from actors.sink import RemoteRecorder
from storage import TraceDataset
from tests.bench.bench_pipeline import SPEC, SyntheticBackend, requests

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("cluster")]
STEPS, SAMPLES, MIB = 300, 4, 1 << 20


def plasma() -> float:
    """MiB of the object store that are in use."""
    from ray._private.internal_api import memory_summary

    found = re.search(
        r"Plasma memory usage (\d+) MiB", memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    )
    assert found is not None
    return float(found[1])


def resident(pid: int) -> float:
    """MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) - int(
        Path(f"/proc/{pid}/statm").read_text().split()[2]
    )
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def sink_pid(recorder: RemoteRecorder) -> int:
    return int(ray.get(recorder._sinks[0].__ray_call__.remote(lambda self: __import__("os").getpid())))


def test_memory_stays_flat_over_300_steps(tmp_path: Path) -> None:
    pool = ActorPool(
        "none", num_actors=1, num_cpus=0.5, engine_options={"tokens": 256}, backend_factory=SyntheticBackend
    )
    recorder = RemoteRecorder(tmp_path / "traces", SPEC)
    pid = sink_pid(recorder)
    stored, grown = [], []
    for step in range(STEPS):
        for finished in pool.stream(requests(step, SAMPLES)):
            recorder.write(finished, step)
        recorder.commit(step)
        if step % 20 == 0:
            stored.append(plasma())
            grown.append(resident(pid))
    recorder.close()
    pool.close()
    written = STEPS * SAMPLES * 511 * SPEC.row_bytes / MIB
    assert written > 200
    assert max(stored) < 64, stored
    assert max(grown[5:]) - grown[4] < 48, grown
    assert len(TraceDataset(tmp_path / "traces")) == STEPS * SAMPLES
