"""Speed of the storage on one core, against the floors of the format: `python -m tests.bench.bench_storage`.

Routes of Qwen3-30B-A3B (48 sites, top 8 of 128), with experts of unequal load. MB are 10**6 bytes of ids in memory.
Each figure is the best of several rounds, since other load only ever makes it worse; the ratio is to its floor.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from storage import RoutingSpec, Trace, TraceDataset, TraceWriter
from storage.part import Compression
from storage.schema import to_table

SPEC = RoutingSpec.uniform(num_sites=48, num_experts=128, top_k=8)
SAMPLES, TOKENS, ROUNDS = 128, 2000, 5
FLOORS = {"write": 300.0, "read zstd": 400.0, "read plain": 1500.0}


def routes(rng: np.random.Generator) -> np.ndarray:
    """Ids `[tokens - 1, 48, 8]` whose experts have unequal load, as trained routers have."""
    ids = rng.beta(0.7, 1.3, (TOKENS - 1, *SPEC.row_shape)) * 128
    return ids.astype(np.uint8)


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


def best(action: Callable[[], object], megabytes: float) -> float:
    """MB/s of the fastest of several rounds."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return megabytes / min(seconds)


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


def main() -> None:
    """Print the figures."""
    pa.set_cpu_count(1)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    table = to_table(make_traces(0, [routes(rng) for _ in range(16)]), SPEC)
    megabytes = SAMPLES * (TOKENS - 1) * SPEC.row_bytes / 1e6
    with tempfile.TemporaryDirectory() as folder:
        zstd, plain = Path(folder, "zstd"), Path(folder, "plain")
        figures = {"write": best(lambda: write(zstd, table), megabytes)}
        write(plain, table, compression="none")
        size = sum(file.stat().st_size for file in zstd.glob("*/*.parquet")) / 1e6
        figures["read zstd"] = best(lambda: scan_to_torch(zstd), megabytes)
        figures["read plain"] = best(lambda: scan_to_torch(plain), megabytes)
        others = {
            "read zstd, as Trace": best(lambda: read_to_torch(zstd), megabytes),
            "read plain, as Trace": best(lambda: read_to_torch(plain), megabytes),
        }
    print(f"{megabytes:.0f} MB of ids, {size:.0f} MB on disk, best of {ROUNDS}")
    for name, figure in figures.items():
        print(f"{name:22} {figure:7.0f} MB/s  {figure / FLOORS[name]:5.2f} of the floor of {FLOORS[name]:.0f}")
    for name, figure in others.items():
        print(f"{name:22} {figure:7.0f} MB/s")
    peak = pa.default_memory_pool().max_memory() / 1e6
    print(f"Arrow memory of all that at most {peak:.0f} MB")


if __name__ == "__main__":
    main()
