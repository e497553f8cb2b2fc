"""Three hundred steps of large traces: neither the object store grows nor the driver, the generator or the sink."""

from __future__ import annotations

import os
import re
from pathlib import Path
from statistics import median

import pytest
import ray

from actors.pool import ActorPool
from actors.sink import RemoteRecorder
from storage import TraceDataset
from tests.bench.bench_pipeline import PROMPT, SPEC, SyntheticBackend, requests

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("cluster")]
STEPS, WARM_UP, SAMPLES, TOKENS, MIB = 300, 80, 4, 768, 1 << 20


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


def pids(pool: ActorPool, recorder: RemoteRecorder) -> dict[str, int]:
    """Of every process that a trace passes through."""
    sink = ray.get(recorder._sinks[0].__ray_call__.remote(lambda self: __import__("os").getpid()))
    generator = ray.get(pool._slots[0].handle.health.remote())["pid"]
    return {"driver": os.getpid(), "generator": generator, "sink": sink}


def test_memory_stays_flat_over_300_steps(tmp_path: Path) -> None:
    """In none of the processes would a leak of a tenth of what passes through go unnoticed."""
    pool = ActorPool(
        "none", num_actors=1, num_cpus=0.5, engine_options={"tokens": TOKENS}, backend_factory=SyntheticBackend
    )
    recorder = RemoteRecorder(tmp_path / "traces", SPEC)
    processes = pids(pool, recorder)
    stored: list[float] = []
    held: dict[str, list[float]] = {name: [] for name in processes}
    for step in range(STEPS):
        for finished in pool.stream(requests(step, SAMPLES)):
            recorder.write(finished, step)
        recorder.commit(step)
        if step % 10 == 9:
            stored.append(plasma())
            for name, pid in processes.items():
                held[name].append(resident(pid))
    assert pids(pool, recorder) == processes
    recorder.close()
    pool.close()
    step_mib = SAMPLES * (PROMPT + TOKENS - 1) * SPEC.row_bytes / MIB
    passed = (STEPS - WARM_UP) * step_mib
    assert max(stored) < 64 < passed / 4, stored
    for name, sizes in held.items():
        early, late = median(sizes[WARM_UP // 10 - 3 : WARM_UP // 10 + 3]), median(sizes[-6:])
        assert late - early < passed / 10, (name, sizes)
    assert len(TraceDataset(tmp_path / "traces")) == STEPS * SAMPLES
