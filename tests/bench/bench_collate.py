"""Collate speed per layout: bytes of narrow ids that become a batch per second.

`python -m tests.bench.bench_collate`
"""

from __future__ import annotations

import time

import numpy as np

from storage import ReplayBatch, RoutingSpec, Trace
from storage.layouts import PADDINGS

SPEC = RoutingSpec.uniform(num_sites=48, num_experts=128, top_k=8)


def make_traces(count: int = 32, tokens: int = 2048) -> list[Trace]:
    """Traces of half to the whole of `tokens` tokens, a quarter of them prompt; one byte per id."""
    rng = np.random.default_rng(0)
    traces = []
    for index, length in enumerate(rng.integers(tokens // 2, tokens, count).tolist()):
        prompt = length // 4
        ids = np.argsort(rng.random((length - 1, 1, 128), np.float32))[..., :8].astype(np.uint8)
        routes = np.repeat(ids, SPEC.num_sites, axis=1)
        logprobs = np.zeros(length - prompt, np.float32)
        traces.append(Trace(f"t{index}", 0, [1] * prompt, [2] * (length - prompt), logprobs, routes, "stop"))
    return traces


def seconds(traces: list[Trace], padding: str, repeats: int = 5) -> float:
    """The fastest of `repeats`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        ReplayBatch.collate(traces, spec=SPEC, padding=padding)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    traces = make_traces()
    size = sum(trace.routed_experts.nbytes for trace in traces if trace.routed_experts is not None)
    for padding in PADDINGS:
        took = seconds(traces, padding)
        print(f"{padding:>7}: {size / 1e6:.0f} MB of ids in {took * 1e3:.0f} ms, {size / took / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
