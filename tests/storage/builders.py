"""Small traces for the tests of storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from storage import RoutingSpec, Trace, TraceWriter

SPEC = RoutingSpec.uniform(num_sites=3, num_experts=16, top_k=2)
ONE = RoutingSpec.uniform(num_sites=1, num_experts=16, top_k=1)


def routes(*ids: int) -> np.ndarray:
    """Rows of ONE."""
    return np.array(ids, np.uint8).reshape(-1, 1, 1)


def make_pair() -> list[Trace]:
    """Five tokens with routes from position 1 of which one is invalid, and three tokens with a reward."""
    long = Trace(
        sample_id="long",
        step=0,
        prompt_ids=[11, 12],
        completion_ids=[13, 14, 15],
        logprobs=[-1.0, -2.0, -3.0],
        raw_logprobs=[-1.5, -2.5, -3.5],
        routed_experts=routes(5, 0, 7),
        route_start=1,
        route_valid=[True, False, True],
        finish_reason="length",
        weight_versions=[(0, 0, 3), (1, 3, 4)],
    )
    short = Trace(
        sample_id="short",
        step=0,
        prompt_ids=[21],
        completion_ids=[22, 23],
        logprobs=[-4.0, -5.0],
        raw_logprobs=[-4.5, -5.5],
        routed_experts=routes(8, 9),
        finish_reason="stop",
        reward=1.0,
    )
    return [long, short]


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
