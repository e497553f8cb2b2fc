"""`num_threads="auto"`: how many compute threads make this model's steps fastest here and now, by a short measurement.

More threads gain on a quiet machine with large matrices, and cost several times over wherever anything else runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from rollout.device import CpuStream
from rollout.model_runner import ModelRunner
from rollout.self_test import time_decode

logger = logging.getLogger(__name__)
REPEATS = 4
MIN_GAIN = 1.1


def candidates(limit: int | None = None) -> list[int]:
    """Powers of two up to the cores that this process may use, and at most `limit`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [count for count in (1 << i for i in range(cores.bit_length())) if count <= min(cores, limit or cores)]


def fastest(seconds: Mapping[int, float]) -> int:
    """The number of threads that is worth it: each next one must be a tenth faster than what was chosen before it.

    >>> fastest({1: 10.0, 2: 9.5, 4: 6.0})
    4
    >>> fastest({1: 10.0, 2: 9.5})
    1
    """
    chosen = min(seconds)
    for count in sorted(seconds):
        if seconds[count] * MIN_GAIN <= seconds[chosen]:
            chosen = count
    return chosen


def choose_threads(runner: ModelRunner, requests: int, counts: Sequence[int]) -> int:
    """Set the stream's compute threads to the fastest of `counts` for decode steps of so many requests, and say which.

    The runner's pool is empty before and of another size afterwards.
    """
    if not isinstance(runner.stream, CpuStream) or len(counts) < 2:
        return 1
    seconds: dict[int, float] = {}
    for repeat in range(REPEATS + 1):
        for count in counts:
            runner.stream.set_num_threads(count)
            took = time_decode(runner, requests)
            if repeat:  # the first one warms up
                seconds[count] = min(took, seconds.get(count, took))
    chosen = fastest(seconds)
    runner.stream.set_num_threads(chosen)
    measured = ", ".join(f"{1e3 * took:.1f} ms with {count}" for count, took in seconds.items())
    logger.info("num_threads='auto': a step of %d requests took %s; %d chosen", requests, measured, chosen)
    return chosen
