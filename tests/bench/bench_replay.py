"""What replay adds to a training step: forward and backward with and without it, interleaved, medians.

    python -m tests.bench.bench_replay --model mid --repeats 5

One ratio within one run; no times are compared between runs.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollout import RouterReplay
from storage import ReplayBatch, Trace
from tests.bench.models import save_model


def own_batch(model: Any, replay: RouterReplay, sequences: int, tokens: int) -> ReplayBatch:
    """Sequences with the model's own routes, so that both steps load the experts alike."""
    rng = np.random.default_rng(0)
    ids = rng.integers(3, model.config.vocab_size, (sequences, tokens))
    with replay.record() as recorded, torch.no_grad():
        model(input_ids=torch.from_numpy(ids))
    routes = recorded.routed_experts.reshape(sequences, tokens, *replay.spec.row_shape)
    half = tokens // 2
    traces = [
        Trace(
            f"run/0/{i}/0",
            0,
            row[:half].tolist(),
            row[half:].tolist(),
            [-1.0] * (tokens - half),
            routes[i, :-1],
            "length",
        )
        for i, row in enumerate(ids)
    ]
    return ReplayBatch.collate(traces, spec=replay.spec)


def step_seconds(model: Any, batch: ReplayBatch, context: Any) -> float:
    """One forward and backward."""
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    with context:
        batch.token_logprobs(model(**batch.model_inputs()).logits).sum().backward()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("small", "mid"), default="mid")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        path = save_model(chosen.model, Path(scratch))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, chosen.dtype)).train()
    replay = RouterReplay(model)
    batch = own_batch(model, replay, chosen.sequences, chosen.tokens)
    plain, replayed = [], []
    for _ in range(chosen.repeats + 1):
        plain.append(step_seconds(model, batch, contextlib.nullcontext()))
        replayed.append(step_seconds(model, batch, replay(batch)))
    ratios = [b / a for a, b in zip(plain[1:], replayed[1:], strict=True)]
    what = f"{chosen.model} {chosen.dtype}, {chosen.sequences} x {chosen.tokens} tokens"
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(
        f"{what}: step {statistics.median(plain[1:]):.3f} s, with / without {statistics.median(ratios):.3f} ({spread})"
    )


if __name__ == "__main__":
    main()
