"""How fast traces of a large model go through the actors and one sink, without a model.

    python -m tests.bench.bench_pipeline --samples 400

A synthetic engine emits traces of Qwen3-30B-A3B's shape (48 routers, 128 experts, top 8) as fast as it can, through the
real generator actor, object store and sink into a committed dataset: the engine and its encoding alone, the sink alone,
and both together. Rates are by the clock and by what each process was charged for, which other load hardly changes; the
last line but one names the process that holds up the others.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from actors.pool import ActorPool
from actors.sink import RemoteRecorder
from rollout.backend import ModelInfo, SampleRequest
from rollout.sampling import SamplingParams
from storage.schema import to_table
from storage.trace import RoutingSpec, Trace
from tests.bench.cpu_time import Stopwatch, bottleneck

SPEC = RoutingSpec.uniform(num_sites=48, num_experts=128, top_k=8)
PROMPT = 256


class SyntheticBackend:
    """Traces of a fixed length; ids drawn once, with the skew of a trained router, and shifted per sample."""

    has_refs = False

    def figures(self) -> dict[str, float]:
        return {"engines": 1}

    version = 0

    def __init__(self, model: str, *, tokens: int) -> None:
        self.info = ModelInfo(SPEC, 151_936, 1 << 20, "nothing", None, True)
        rng = np.random.default_rng(0)
        rows = PROMPT + tokens - 1
        scores = rng.normal(size=(rows, 48, 128)) + 1.5 * rng.normal(size=(1, 48, 128))
        self._ids = np.argpartition(-scores, 8, axis=-1)[..., :8].astype(np.uint8)
        self._tokens = rng.integers(0, 150_000, PROMPT + tokens).tolist()
        self._logprobs = -rng.random(tokens, np.float32)

    def stream(self, requests: Sequence[SampleRequest]) -> _Stream:
        return _Stream(self, requests)

    def trace(self, request: SampleRequest) -> Trace:
        shift = request.sample_id.__hash__() % 128
        return Trace(
            sample_id=request.sample_id,
            step=request.step,
            prompt_ids=self._tokens[:PROMPT],
            completion_ids=self._tokens[PROMPT:],
            logprobs=self._logprobs,
            raw_logprobs=self._logprobs,
            routed_experts=(self._ids + np.uint8(shift)) % np.uint8(128),
            finish_reason="length",
        )

    def close(self) -> None:
        """Nothing runs."""


class _Stream(Iterator[Any]):
    def __init__(self, backend: SyntheticBackend, requests: Sequence[SampleRequest]) -> None:
        self._backend, self._requests = backend, deque(requests)

    def __next__(self) -> Any:
        if not self._requests:
            raise StopIteration
        return _Finished([self._backend.trace(self._requests.popleft())])

    def abort(self) -> None:
        self._requests.clear()

    close = abort


class _Finished:
    ref = None

    def __init__(self, items: list[Trace]) -> None:
        self._items = items

    def traces(self) -> list[Trace]:
        return self._items

    def table(self) -> pa.Table:
        return to_table(self._items, SPEC)


def requests(step: int, count: int) -> list[SampleRequest]:
    return [SampleRequest(f"run/{step}/{i}/0", step, (5,), SamplingParams(seed=0)) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=768, help="completion tokens per sample")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--sinks", type=int, default=1)
    chosen = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=chosen.actors + 1, include_dashboard=False, log_to_driver=False)
    pool = ActorPool(
        "none", num_actors=chosen.actors, engine_options={"tokens": chosen.tokens}, backend_factory=SyntheticBackend
    )
    with tempfile.TemporaryDirectory() as scratch:
        measure(pool, Path(scratch), chosen.samples, PROMPT + chosen.tokens - 1, chosen.sinks)
    pool.close()
    ray.shutdown()


def measure(pool: ActorPool, scratch: Path, samples: int, rows: int, sinks: int) -> None:
    """Print the three rates, what each process was charged for them, and who holds up the whole."""
    driver = {"driver": [os.getpid()]}
    generator = {"generator": [ray.get(slot.handle.health.remote())["pid"] for slot in pool._slots]}
    watch = Stopwatch(driver | generator)
    tables = list(pool.stream(requests(0, samples)))
    _report("engine and encoding alone", samples, rows, watch)

    recorder = RemoteRecorder(scratch / "sink", SPEC, num_sinks=sinks)
    watch = Stopwatch(driver | _sinks(recorder))
    for finished in tables:
        recorder.write(finished, 0)
    recorder.commit(0)
    _report(f"{sinks} sinks alone", samples, rows, watch)
    recorder.close()
    del tables, finished

    recorder = RemoteRecorder(scratch / "both", SPEC, num_sinks=sinks)
    watch = Stopwatch(driver | generator | _sinks(recorder))
    for finished in pool.stream(requests(1, samples)):
        recorder.write(finished, 1)
    recorder.commit(1)
    busy = watch.busy()
    _report("both together", samples, rows, watch)
    recorder.close()
    print(f"bottleneck of both: {bottleneck(busy)}")
    size = sum(file.stat().st_size for file in (scratch / "both").rglob("*.parquet"))
    print(f"on disk {size / samples / rows:.0f} bytes per row of {SPEC.row_bytes}")


def _sinks(recorder: RemoteRecorder) -> dict[str, list[int]]:
    return {"sink": ray.get([sink.__ray_call__.remote(lambda self: os.getpid()) for sink in recorder._sinks])}


def _report(what: str, samples: int, rows: int, watch: Stopwatch) -> None:
    """Rates by the clock; then, for each kind of process, MB of ids per second that a core was charged for."""
    seconds, charged = watch.read()
    megabytes = samples * rows * SPEC.row_bytes / 1e6
    rates = f"{samples / seconds:7.1f} samples/s {rows * samples / seconds:9.0f} rows/s"
    cores = ", ".join(f"{name} {megabytes / max(cpu, 0.01):.0f}" for name, cpu in charged.items())
    print(f"{what:26} {rates} {megabytes / seconds:6.0f} MB/s; MB/s of a core: {cores}")


if __name__ == "__main__":
    main()
