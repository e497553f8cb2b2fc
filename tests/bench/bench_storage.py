"""Speed of the storage on one core, against the floors of the format: `python -m tests.bench.bench_storage`.

Routes of Qwen3-30B-A3B (48 sites, top 8 of 128), with experts of unequal load. MB are 10**6 bytes of ids in memory.
Each figure is the best of several rounds, since other load only ever makes it worse; the ratio is to its floor. Then
the time to open a dataset of 10,000 steps and to find a sample in it (bench_steps.py), which takes some minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from storage import RoutingSpec, Trace, TraceDataset, TraceWriter
from storage.part import ROW_GROUP_SAMPLES, Compression
from storage.schema import to_table
from tests.bench.bench_steps import measure_in_memory

SPEC = RoutingSpec.uniform(num_sites=48, num_experts=128, top_k=8)
SAMPLES, TOKENS, ROUNDS, STEPS = 128, 2000, 5, 10_000
FLOORS = {"write": 300.0, "read zstd": 400.0, "read plain": 1500.0}


def routes(rng: np.random.Generator) -> np.ndarray:
    """Ids `[tokens - 1, 48, 8]` whose experts have unequal load, other ones at each site, as trained routers have."""
    ranks = (rng.beta(0.7, 1.3, (TOKENS - 1, *SPEC.row_shape)) * 128).astype(np.uint8)
    popular = np.random.default_rng(0).permuted(np.tile(np.arange(128, dtype=np.uint8), (SPEC.num_sites, 1)), axis=1)
    return popular[np.arange(SPEC.num_sites)[:, None], ranks]


def make_traces(step: int, ids: list[np.ndarray]) -> list[Trace]:
    """SAMPLES traces of TOKENS tokens."""
    half = TOKENS // 2
    numbers = np.zeros(half, np.float32)
    return [
        Trace(
            sample_id=f"run/{step}/{sample}/0",
            step=step,
            prompt_ids=[1] * half,
            completion_ids=[2] * half,
            logprobs=numbers,
            raw_logprobs=numbers,
            routed_experts=ids[sample % len(ids)],
            finish_reason="length",
        )
        for sample in range(SAMPLES)
    ]


class Speed(NamedTuple):
    """MB/s of the fastest of several rounds: per second of one core's work, and per second of the clock."""

    core: float
    clock: float


def best(action: Callable[[], object], megabytes: float) -> Speed:
    """The core's work is what the process was charged for, which other load on the machine hardly changes."""
    core, clock = [], []
    for _ in range(ROUNDS):
        charged, started = time.process_time(), time.perf_counter()
        action()
        core.append(time.process_time() - charged)
        clock.append(time.perf_counter() - started)
    return Speed(megabytes / min(core), megabytes / min(clock))


def read_to_torch(root: Path) -> int:
    """Every trace's routes as a tensor, page checksums and crc32 checked; returns the number of ids."""
    return sum(torch.from_numpy(trace.routed_experts).numel() for trace in TraceDataset(root).iter())


def scan_to_torch(root: Path) -> int:
    """Every route as a tensor, page checksums checked, no Trace objects."""
    total = 0
    for batch in TraceDataset(root).scan(columns=["routed_experts"]):
        values = batch.column(0).flatten()
        total += torch.frombuffer(values.buffers()[2], dtype=torch.uint8).numel()
    return total


def write(root: Path, table: pa.Table, compression: Compression = "zstd") -> None:
    """One committed step, everything included: checks, checksums, sha256, fsync."""
    shutil.rmtree(root, ignore_errors=True)
    with TraceWriter(root, SPEC, compression=compression) as writer:
        writer.write(table, step=0)
        writer.commit(0)


SCAN = """
import sys, pyarrow as pa
from storage import TraceDataset
pa.set_cpu_count(1)
rows = sum(batch.num_rows for batch in TraceDataset(sys.argv[1]).scan())
print(rows, pa.default_memory_pool().max_memory())
"""


def scan_memory(root: Path) -> float:
    """Arrow memory, in MB, of a process that scans all columns of the dataset."""
    out = subprocess.run([sys.executable, "-c", SCAN, str(root)], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows, peak = map(int, out.split())
    assert rows == SAMPLES
    return peak / 1e6


def on_disk(root: Path) -> float:
    """MB of Parquet."""
    return sum(file.stat().st_size for file in root.glob("*-*/*.parquet")) / 1e6


def main() -> None:
    """Print the figures."""
    pa.set_cpu_count(1)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    table = to_table(make_traces(0, [routes(rng) for _ in range(16)]), SPEC)
    megabytes = SAMPLES * (TOKENS - 1) * SPEC.row_bytes / 1e6
    with tempfile.TemporaryDirectory() as folder:
        zstd, plain = Path(folder, "zstd"), Path(folder, "plain")
        speeds = {"write": best(lambda: write(zstd, table), megabytes)}
        write(plain, table, compression="none")
        speeds["read zstd"] = best(lambda: scan_to_torch(zstd), megabytes)
        speeds["read plain"] = best(lambda: scan_to_torch(plain), megabytes)
        speeds["read zstd, as Trace"] = best(lambda: read_to_torch(zstd), megabytes)
        speeds["read plain, as Trace"] = best(lambda: read_to_torch(plain), megabytes)
        before, memory = on_disk(zstd), scan_memory(zstd)
        TraceDataset(zstd).archive(before=1)
        archived = on_disk(zstd)
        speeds["read archive"] = best(lambda: scan_to_torch(zstd), megabytes)
    print(f"{megabytes:.0f} MB of ids, {before:.0f} MB on disk, archived {archived:.0f} MB, best of {ROUNDS}")
    print(f"{'MB/s of':22} {'a core':>8} {'the clock':>10}")
    for name, speed in speeds.items():
        floor = FLOORS.get(name)
        ratio = "" if floor is None else f"  a core does {speed.core / floor:5.2f} of the floor of {floor:.0f}"
        print(f"{name:22} {speed.core:8.0f} {speed.clock:10.0f}{ratio}")
    group = ROW_GROUP_SAMPLES * (TOKENS - 1) * SPEC.row_bytes / 1e6
    print(f"a scan takes {memory:.0f} MB of Arrow memory, {memory / group:.1f} row groups of {group:.0f} MB")
    measure_in_memory(STEPS)


if __name__ == "__main__":
    main()
