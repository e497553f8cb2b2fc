"""Small traces for the tests of storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from storage import RoutingSpec, Trace, TraceWriter

SPEC = RoutingSpec.uniform(num_sites=3, num_experts=16, top_k=2)


def make_trace(step: int = 0, sample: int = 0, *, prompt: int = 3, completion: int = 4, **fields: Any) -> Trace:
    """A full trace of SPEC whose ids, routes and logprobs follow from (step, sample)."""
    rng = np.random.default_rng([step, sample])
    defaults = {
        "sample_id": f"run/{step}/{sample}/0",
        "step": step,
        "prompt_ids": rng.integers(0, 99, prompt).tolist(),
        "completion_ids": rng.integers(0, 99, completion).tolist(),
        "logprobs": -rng.random(completion),
        "raw_logprobs": -rng.random(completion),
        "routed_experts": rng.integers(0, 16, (prompt + completion - 1, 3, 2)).astype(np.uint8),
        "finish_reason": "stop",
        "seed": sample,
    }
    return Trace(**(defaults | fields))


def make_traces(step: int, count: int = 5) -> list[Trace]:
    """Traces of one step, of different lengths."""
    return [make_trace(step, sample, completion=2 + sample) for sample in range(count)]


def commit(root: Path, *steps: int) -> None:
    """Write and commit `make_traces` of each step."""
    with TraceWriter(root, SPEC) as writer:
        for step in steps:
            writer.write(make_traces(step), step=step)
            writer.commit(step)
