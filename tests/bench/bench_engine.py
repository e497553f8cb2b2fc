"""Ratios of one run: recording on against off, overlap on against off, batches of 1, 16 and 64, batch invariance.

    python -m tests.bench.bench_engine --repeats 5

All variants sample the same prompts, in turn, so that a machine whose speed drifts slows all of them. Medians of
tokens/s over the repeats; the first round is a warm-up. Ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rollout import RolloutClient, SamplingParams
from tests.bench.models import make_small

PROMPT_LEN, NEW_TOKENS = 64, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        clients = open_clients(Path(scratch), options.threads, stack)
        rounds = [
            {name: tokens_per_second(*client) for name, client in clients.items()} for _ in range(options.repeats + 1)
        ]
    Console().print(table(rounds[1:]))


def open_clients(scratch: Path, threads: int, stack: contextlib.ExitStack) -> dict[str, tuple[RolloutClient, int]]:
    """(client, batch size) by name; all stay open, so that rounds interleave."""
    model = make_small(scratch)

    def client(**options: Any) -> RolloutClient:
        return stack.enter_context(RolloutClient.local(model, dtype="float32", num_threads=threads, **options))

    recording = client()
    return {
        "recording B64": (recording, 64),
        "recording + dataset B64": (client(traces=scratch / "traces"), 64),
        "recording off B64": (client(enable_return_routed_experts=False), 64),
        "overlap off B64": (client(disable_overlap_schedule=True), 64),
        "batch_invariant B64": (client(batch_invariant=True), 64),
        "recording B16": (recording, 16),
        "recording off B16": (client(enable_return_routed_experts=False), 16),
        "overlap off B16": (client(disable_overlap_schedule=True), 16),
        "batch_invariant B16": (client(batch_invariant=True), 16),
        "recording B1": (recording, 1),
    }


RATIOS = [
    ("recording B64", "recording off B64"),
    ("recording + dataset B64", "recording off B64"),
    ("recording B16", "recording off B16"),
    ("recording B64", "overlap off B64"),
    ("recording B16", "overlap off B16"),
    ("batch_invariant B64", "recording B64"),
    ("batch_invariant B16", "recording B16"),
    ("recording B16", "recording B1"),
    ("recording B64", "recording B1"),
]


def tokens_per_second(client: RolloutClient, batch: int) -> float:
    """Sampled tokens per second of one batch, prefill included."""
    prompts = [[(i * 37 + j * 11) % 4000 + 2 for j in range(PROMPT_LEN)] for i in range(batch)]
    new_tokens = NEW_TOKENS if batch > 1 else NEW_TOKENS // 2
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, seed=0)
    started = time.perf_counter()
    client.sample(prompts, sampling_params=params)
    return batch * new_tokens / (time.perf_counter() - started)


def table(rounds: list[dict[str, float]]) -> Table:
    """Medians and ratios."""
    title = f"small model, {PROMPT_LEN} + {NEW_TOKENS} tokens, {len(rounds)} rounds"
    out = Table("variant", "median", "min", "max", title=title)
    for name in rounds[0]:
        values = [r[name] for r in rounds]
        out.add_row(name, *(f"{f(values):.0f} tok/s" for f in (statistics.median, min, max)))
    for a, b in RATIOS:
        values = [r[a] / r[b] for r in rounds]
        out.add_row(f"{a} / {b}", *(f"{f(values):.3f}" for f in (statistics.median, min, max)))
    return out


if __name__ == "__main__":
    main()
