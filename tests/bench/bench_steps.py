"""Time to open a dataset of many steps and to find one sample: `python -m tests.bench.bench_steps --steps 10000`.

On a file system in memory: as committed, with the index of `build_index()`, and compacted into packs. Seconds are
medians; a dataset is opened anew for each.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from storage import RoutingSpec, Trace, TraceDataset, TraceWriter

SPEC = RoutingSpec.uniform(num_sites=8, num_experts=64, top_k=4)
SAMPLES, TOKENS, OPENS, LOOKUPS = 2, 16, 3, 50


def make_traces(step: int) -> list[Trace]:
    """Small ones: what is measured is the number of steps."""
    ids = np.random.default_rng(step).integers(0, 64, (TOKENS - 1, *SPEC.row_shape)).astype(np.uint8)
    half = TOKENS // 2
    given = {"prompt_ids": [1] * half, "completion_ids": [2] * half, "logprobs": np.zeros(half, np.float32)}
    return [
        Trace(sample_id=f"run/{step}/{i}/0", step=step, routed_experts=ids, finish_reason="length", **given)
        for i in range(SAMPLES)
    ]


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure_in_memory(steps: int) -> None:
    """`measure` on a file system in memory where there is one: 10,000 commits would wait for a disk for minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        measure(Path(folder, "steps"), steps)


def measure(root: Path, steps: int) -> None:
    """Write a dataset of `steps` steps at `root` and print a line for each of its three forms."""

    def write() -> None:
        with TraceWriter(root, SPEC) as writer:
            for step in range(steps):
                writer.write(make_traces(step), step=step)
                writer.commit(step)
        (root / "_index.arrow").unlink(missing_ok=True)

    print(f"{steps} steps of {SAMPLES} samples: {steps / seconds(write):.0f} commits/s")
    _report(root, steps, "as committed")
    TraceDataset(root).build_index()
    _report(root, steps, "with an index")
    TraceDataset(root).compact()
    _report(root, steps, "compacted")


def _report(root: Path, steps: int, what: str) -> None:
    opened = median(seconds(lambda: TraceDataset(root)) for _ in range(OPENS))
    counted = median(seconds(lambda: len(TraceDataset(root))) for _ in range(OPENS))
    dataset, rng = TraceDataset(root), random.Random(0)
    names = [f"run/{rng.randrange(steps)}/{rng.randrange(SAMPLES)}/0" for _ in range(LOOKUPS)]
    found = median(seconds(lambda name=name: dataset[name]) for name in names)
    print(f"{what:14} open {opened:6.3f} s, open and len() {counted:6.3f} s, ds[sample_id] {1000 * found:6.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    chosen = parser.parse_args()
    measure_in_memory(chosen.steps)


if __name__ == "__main__":
    main()
