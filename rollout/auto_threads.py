"""How many compute threads make this model's steps fastest here and now, by a short measurement at start.

More threads gain on a quiet machine with large matrices, and cost several times over wherever anything else runs. Our
own kernels gain from them also in steps whose other operations are too short for more than one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


class Threads(NamedTuple):
    """Compute threads of an engine, and those of torch's operations in steps of few tokens; see CpuStream."""

    num: int
    few: int

    def __str__(self) -> str:
        return str(self.num) if self.few == self.num else f"{self.num} (torch {self.few})"


def fastest(seconds: Mapping[Threads, float]) -> Threads:
    """The threads that are worth it: with more than what was chosen before, a step must be a tenth faster.

    >>> fastest({Threads(1, 1): 10.0, Threads(2, 1): 9.5, Threads(4, 1): 6.0})
    Threads(num=4, few=1)
    >>> fastest({Threads(1, 1): 10.0, Threads(2, 1): 9.5, Threads(2, 2): 12.0})
    Threads(num=1, few=1)
    """
    chosen = min(seconds)
    for threads in sorted(seconds):
        gain = MIN_GAIN if threads.num > chosen.num else 1.0
        if seconds[threads] * gain <= seconds[chosen]:
            chosen = threads
    return chosen


def choose_threads(runner: ModelRunner, requests: int, given: Sequence[Threads]) -> Threads:
    """Set the compute threads to the fastest of those given for decode steps of so many requests, and say which.

    The runner's pool is empty before and of another size afterwards.
    """
    stream, native = runner.stream, runner.fast_layers.native
    assert isinstance(stream, CpuStream)
    ways = sorted(set(given))

    def use(threads: Threads) -> None:
        stream.set_num_threads(*threads)
        if native is not None:
            native.num_threads = threads.num

    seconds: dict[Threads, float] = {}
    for repeat in range(REPEATS + 1 if len(ways) > 1 else 0):
        for threads in ways:
            use(threads)
            took = time_decode(runner, requests)
            if repeat:  # the first one warms up
                seconds[threads] = min(took, seconds.get(threads, took))
    chosen = fastest(seconds) if seconds else ways[0]
    use(chosen)
    measured = ", ".join(f"{1e3 * took:.1f} ms with {threads}" for threads, took in seconds.items())
    logger.info("a step of %d requests took %s; %s chosen", requests, measured, chosen)
    return chosen
