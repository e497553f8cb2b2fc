"""What a decode step costs when more requests wait, or when their contexts are longer, against a prediction.

Requests that wait add no bytes and no operations: the prediction is the same step. Longer contexts add keys and values
to read and products with them: the prediction adds the longer of both times at the rates that `rollout.floor` measures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch import set_num_threads

from rollout.device import CpuStream
from rollout.floor import Attention, Floor, attention_of, measure_floor
from tests.bench.models import save_model
from tests.bench.steps import plain
from tests.sim.engines import Rig, build

Row = dict[str, Any]
SHORT = 16
MAX_BATCH_TOKENS = 2048


def growth(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Ms per decode step with more waiting requests and with longer contexts, against bytes and operations."""
    rows = []
    for size in options.sizes.split(","):
        path = Path(save_model(size, scratch))
        model = plain(str(path))
        for threads in options.threads:
            floor = measure_floor(model.dtype, threads)
            where = {"size": size, "batch": options.batch, "threads": threads}
            waits = measure(path, threads, options, [(waiting, SHORT) for waiting in options.waiting])
            rows += [where | row for row in compared("waiting", options.waiting, waits, [0.0] * len(waits))]
            longer = measure(path, threads, options, [(0, length) for length in options.context])
            floor = floor.best(measure_floor(model.dtype, threads))
            more = [extra_ms(length, options, floor, attention_of(model)) for length in options.context]
            rows += [where | row for row in compared("context", options.context, longer, more)]
    return rows


def extra_ms(length: int, options: argparse.Namespace, floor: Floor, attention: Attention) -> float:
    """Ms that keys, values and attention of a context add to a step at best, compared with the first context."""
    tokens = options.batch * (length - options.context[0])
    read, computed = tokens * attention.token_bytes / floor.read, tokens * attention.pair_flops / floor.flops
    return 1e3 * max(read, computed)


def compared(what: str, counts: Sequence[int], ms: Sequence[float], more: Sequence[float]) -> list[Row]:
    """A row per count: measured, predicted from the first one, and their ratio.

    >>> compared("context", [128, 2048], [20.0, 66.0], [0.0, 40.0])[1]
    {'what': 'context', 'count': 2048, 'ms/step': 66.0, 'predicted ms': 60.0, 'measured / predicted': 1.1}
    """
    predicted = [ms[0] + extra for extra in more]
    return [
        {"what": what, "count": count, "ms/step": took, "predicted ms": wanted, "measured / predicted": took / wanted}
        for count, took, wanted in zip(counts, ms, predicted, strict=True)
    ]


def measure(path: Path, threads: int, options: argparse.Namespace, shapes: list[tuple[int, int]]) -> list[float]:
    """Median ms of a decode step of the batch, for each (requests that wait, tokens of context), measured in turn."""
    longest = max(length for _, length in shapes)
    sizes = {
        "max_running_requests": options.batch,
        "max_batch_tokens": MAX_BATCH_TOKENS,
        "kv_tokens": options.batch * (longest + options.new_tokens + spare(options.batch, longest) + 1),
        "experts_implementation": "auto",
        "native_kernels": "auto",
        "num_threads": threads,
    }
    set_num_threads(threads)
    rig = build(path, CpuStream(num_threads=threads), **sizes)
    rounds = [[steps(rig, *shape, options) for shape in shapes] for _ in range(options.repeats + 1)]
    rig.built.close()
    return [median(found) for found in zip(*rounds[1:], strict=True)]


def steps(rig: Rig, waiting: int, length: int, options: argparse.Namespace) -> float:
    """Median ms between the turns of a full batch that only decodes; then all requests are dropped."""
    most = options.new_tokens + spare(options.batch, length)
    added = [
        rig.add(length, index, max_tokens=most, temperature=1.0, ignore_eos=True)
        for index in range(options.batch + waiting)
    ]
    running = added[: options.batch]
    while any(not request.output_ids for request in running):
        rig.turn()
    times = []
    for _ in range(options.new_tokens):
        begun = time.perf_counter()
        rig.turn()
        times.append(1e3 * (time.perf_counter() - begun))
    ended = [request for request in added if request.finish_reason is not None]
    if ended:
        raise RuntimeError(f"{len(ended)} of {len(added)} requests ended too early: {ended[0].error or 'by length'}")
    rig.built.engine.abort(added)
    rig.finish()
    return median(times)


def spare(batch: int, length: int) -> int:
    """Tokens that the first request is ahead of the last one at most: steps that their prompts take, and some."""
    return -(-batch * length // (MAX_BATCH_TOKENS - batch)) + 4
