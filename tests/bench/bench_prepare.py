"""Host time of a decode step's inputs: planned from its requests, and made from the step before.

`python -m tests.bench.bench_prepare`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH

REPEATS = 2000
MEASURED_STEP = 6


def microseconds(call: Callable[[], object]) -> float:
    """Of one call, the mean of many."""
    assert call() is not None
    begun = time.perf_counter()
    for _ in range(REPEATS):
        call()
    return (time.perf_counter() - begun) / REPEATS * 1e6


def measure(client: RolloutClient, requests: int) -> tuple[float, float]:
    """Both, at a decode step of so many requests."""
    runner = client.backend._built.runner  # type: ignore[attr-defined]
    prepare, steps, found = runner.prepare, iter(range(1000)), (0.0, 0.0)

    def timed(batch: Any, rows: int | None = None) -> Any:
        nonlocal found
        if next(steps) == MEASURED_STEP:
            before = runner._decodes
            planned = microseconds(lambda: runner._plan(batch, rows))
            found = planned, microseconds(lambda: before.next(batch, rows))
        return prepare(batch, rows)

    runner.prepare = timed
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=0)
    for trace in client.sample([[3 + i % 12, 4] for i in range(requests)], sampling_params=params):
        if trace.finish_reason != "length":
            raise RuntimeError(f"nothing was measured: a request ended with {trace.finish_reason}")
    return found


def main() -> None:
    for requests in (16, 64):
        with RolloutClient.local(MODEL_PATH, num_threads=1, max_running_requests=requests) as client:
            planned, made = measure(client, requests)
        print(f"{requests} requests: planned in {planned:.0f} us, from the step before in {made:.0f} us")


if __name__ == "__main__":
    main()
