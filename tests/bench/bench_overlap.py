"""What overlap gains, alone and with host work of half the model's time added to each step.

    python -m tests.bench.bench_overlap --batch 16 --new-tokens 64 --repeats 3

Both orders of the same loop run in turn in one process. With device time d and host time h per step, the ideal gain is
(d + h) / max(d, h): d is what the synchronous loop waits for the device, h the rest of its step. The added work sorts
numpy arrays and encodes them as compressed Arrow batches, which release the interpreter's lock, as a trainer's would.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from rollout.device import CpuStream
from tests.bench.models import save_model
from tests.sim.engines import Rig, build

Work = Callable[[], None]


class Run(NamedTuple):
    """Seconds per decode step, and of these the ones spent waiting for the device."""

    step: float
    wait: float


def encode(rows: np.ndarray) -> None:
    """A piece of host work: sort, and write a compressed Arrow batch."""
    batch = pa.record_batch({"rows": np.sort(rows)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)


def work_of(seconds: float) -> Work:
    """Host work that takes about so long alone."""
    rows = np.random.default_rng(0).integers(0, 1 << 30, 1 << 13)
    begun = time.perf_counter()
    for _ in range(50):
        encode(rows)
    count = max(1, round(50 * seconds / (time.perf_counter() - begun)))

    def work() -> None:
        for _ in range(count):
            encode(rows)

    return work


def decode(rig: Rig, overlap: bool, batch: int, new_tokens: int, work: Work | None) -> Run:
    """Decode steps of `batch` requests, after their prompts."""
    engine = rig.built.engine
    engine.step = engine.overlap_loop if overlap else engine.normal_loop
    for index in range(batch):
        rig.add(64, index, max_tokens=new_tokens, temperature=1.0, ignore_eos=True)
    while engine.stats.sampled_tokens % (batch * new_tokens) < batch:
        rig.turn()
    steps, waited, begun = engine.stats.forwards, engine.stats.wait_seconds, time.perf_counter()
    while not engine.idle:
        rig.turn()
        if work is not None:
            work()
    steps = engine.stats.forwards - steps
    return Run((time.perf_counter() - begun) / steps, (engine.stats.wait_seconds - waited) / steps)


def ideal(off: Run) -> float:
    """The gain when everything that can overlap does.

    >>> round(ideal(Run(step=30.0, wait=20.0)), 2)
    1.5
    """
    return off.step / max(off.wait, off.step - off.wait)


def show(name: str, rounds: list[tuple[Run, Run]]) -> None:
    """Median and spread of the gain, and of its share of the ideal."""
    gains = [off.step / on.step for on, off in rounds]
    shares = [gain / ideal(off) for gain, (_, off) in zip(gains, rounds, strict=True)]
    steps = statistics.median(1e3 * on.step for on, _ in rounds), statistics.median(1e3 * off.step for _, off in rounds)
    waits = statistics.median(1e3 * off.wait for _, off in rounds)
    print(f"{name}: on {steps[0]:.1f} ms, off {steps[1]:.1f} ms, of which the device {waits:.1f} ms")
    spread = f"{statistics.median(gains):.3f} ({min(gains):.3f}-{max(gains):.3f})"
    print(f"    gain {spread}, {statistics.median(shares):.1%} of the ideal gain")


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["small", "mid"], default="small")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(save_model(options.size, Path(scratch)))
        sizes = {"max_batch_tokens": 2048, "kv_tokens": 256 * options.batch, "max_running_requests": options.batch}
        rig = build(path, CpuStream(num_threads=1), experts_implementation="auto", **sizes)
        shape = options.batch, options.new_tokens
        plain = decode(rig, False, *shape, None)
        work = work_of(plain.wait / 2)
        for name, added in (("without added work", None), ("with host work of half the model's time", work)):
            show(name, [tuple(decode(rig, on, *shape, added) for on in (True, False)) for _ in range(options.repeats)])
        rig.built.close()


if __name__ == "__main__":
    main()
