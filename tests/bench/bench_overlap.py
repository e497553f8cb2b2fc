"""What overlap gains, alone and with host work of half the model's time added to each step.

    python -m tests.bench.bench_overlap --batch 16 --new-tokens 64 --repeats 3

Both orders of the same loop run in turn in one process: of two clients, and of one engine whose loop is turned by hand,
so that work can be added between its turns. With device time d and host time h per step, the ideal gain is
(d + h) / max(d, h): d is what the synchronous loop waits for the device, h the rest of its step. The added work sorts
numpy arrays and encodes them as compressed Arrow batches, which release the interpreter's lock, as a trainer's would.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from rich.console import Console

from rollout.device import CpuStream
from rollout.look_parser import positive
from tests.bench.bench_shapes import table
from tests.bench.models import save_model
from tests.bench.steps import PROMPT_LEN, opened, sampled
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
    for _ in range(50):  # the first ones load libraries
        encode(rows)
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
        rig.add(PROMPT_LEN, index, max_tokens=new_tokens, temperature=1.0, ignore_eos=True)
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


def gains(rounds: list[tuple[Run, Run]]) -> dict[str, Any]:
    """Medians over rounds of (on, off): ms, the gain with its spread, and its share of the ideal.

    >>> gains([(Run(step=0.02, wait=0.015), Run(step=0.03, wait=0.02))])["gain"]
    1.5
    """
    found = [off.step / on.step for on, off in rounds]
    return {
        "on ms": 1e3 * median(on.step for on, _ in rounds),
        "off ms": 1e3 * median(off.step for _, off in rounds),
        "device ms": 1e3 * median(off.wait for _, off in rounds),
        "gain": median(found),
        "min": min(found),
        "max": max(found),
        "share of ideal": median(gain / ideal(off) for gain, (_, off) in zip(found, rounds, strict=True)),
    }


def in_turn(measure: Callable[[bool], Run], repeats: int) -> list[tuple[Run, Run]]:
    """Rounds of (on, off) behind one that warms up; which comes first alternates."""
    rounds = []
    for number in range(repeats + 1):
        found = {overlap: measure(overlap) for overlap in ((True, False) if number % 2 else (False, True))}
        rounds.append((found[True], found[False]))
    return rounds[1:]


def through_clients(path: str, options: argparse.Namespace) -> list[tuple[Run, Run]]:
    """Two clients, each with an engine on threads of its own; whole calls with prefill."""
    with contextlib.ExitStack() as stack:
        clients = {
            overlap: stack.enter_context(opened(path, 1, options.batch, disable_overlap_schedule=not overlap))
            for overlap in (True, False)
        }

        def measure(overlap: bool) -> Run:
            run = sampled(clients[overlap], options.batch, PROMPT_LEN, options.new_tokens, seed=0)
            steps = run.grown["steps_total"]
            return Run(run.seconds / steps, run.grown["wait_seconds_total"] / steps)

        return in_turn(measure, options.repeats)


def by_hand(path: str, options: argparse.Namespace) -> dict[str, list[tuple[Run, Run]]]:
    """One engine whose loop is turned here, decode steps only: as it is, and with work between its turns."""
    sizes = {"max_batch_tokens": 2048, "kv_tokens": 256 * options.batch, "max_running_requests": options.batch}
    rig = build(Path(path), CpuStream(num_threads=1), experts_implementation="auto", native_kernels="auto", **sizes)
    shape = options.batch, options.new_tokens
    plain = in_turn(lambda overlap: decode(rig, overlap, *shape, None), options.repeats)
    work = work_of(median(off.wait for _, off in plain) / 2)
    added = in_turn(lambda overlap: decode(rig, overlap, *shape, work), options.repeats)
    rig.built.close()
    return {"engine": plain, "engine, host work of half the model's time": added}


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["small", "mid"], default="small")
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.new_tokens < 2:
        parser.error(
            f"--new-tokens {options.new_tokens}: the first comes with the prompt, need 2 to time a decode step"
        )
    with tempfile.TemporaryDirectory() as scratch:
        path = save_model(options.size, Path(scratch))
        measured = {"RolloutClient": through_clients(path, options), **by_hand(path, options)}
    found = {name: gains(rounds) for name, rounds in measured.items()}
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        rows = [{"overlap": name, **figures} for name, figures in found.items()]
        Console().print(table(f"{options.size} B{options.batch}", rows))


if __name__ == "__main__":
    main()
