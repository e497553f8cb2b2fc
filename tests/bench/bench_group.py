"""Two ranks against one process on the same requests: tokens/s as a ratio, and what the ranks spend on each other.

    python -m tests.bench.bench_group --repeats 3

All variants sample the same prompts, in turn, so that a machine whose speed drifts slows all of them; the first round
is a warm-up. Ratios are medians of the ratios within a round. The share of communication is the time that a rank's
forwards spend in collectives and its host in agreements between steps, waiting for the other rank included, of the time
that sampling took; agreements overlap with the running step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from rollout import RolloutClient, SamplingParams
from tests.bench.models import make_small

PROMPT_LEN = 64
ONE = "one process"


class Run(NamedTuple):
    """One variant in one round; `share` of communication is None for a single process."""

    tokens_per_second: float
    share: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        clients = open_clients(make_small(Path(scratch)), options.requests, stack)
        rounds = [
            {name: run(client, options.requests, options.new_tokens) for name, client in clients.items()}
            for _ in range(options.repeats + 1)
        ]
        memory = {name: rank_stats(client) for name, client in clients.items() if name != ONE}
    console = Console()
    console.print(table(rounds[1:], f"{options.requests} requests of {PROMPT_LEN} + {options.new_tokens} tokens"))
    console.print(explanation(rounds[1:], memory), highlight=False)


def open_clients(model: str, requests: int, stack: contextlib.ExitStack) -> dict[str, RolloutClient]:
    """All have room for the same requests, one compute thread per process, and stay open."""

    def client(dp_size: int, **options: Any) -> RolloutClient:
        running = -(-requests // dp_size)
        return stack.enter_context(
            RolloutClient.local(model, dtype="float32", dp_size=dp_size, max_running_requests=running, **options)
        )

    return {
        ONE: client(1),
        "2 ranks, alltoall": client(2, moe_dispatch="alltoall"),
        "2 ranks, allgather": client(2, moe_dispatch="allgather"),
    }


def prompts(requests: int) -> list[list[int]]:
    """As many, each another one, of ids below 4002."""
    return [[(i * 37 + j * 11) % 4000 + 2 for j in range(PROMPT_LEN)] for i in range(requests)]


def run(client: RolloutClient, requests: int, new_tokens: int) -> Run:
    """Sample one batch, prefill included."""
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, seed=0)
    before = communication(client)
    started = time.perf_counter()
    client.sample(prompts(requests), sampling_params=params)
    seconds = time.perf_counter() - started
    share = None if before is None else (communication(client) - before) / seconds
    return Run(requests * new_tokens / seconds, share)


def rank_stats(client: RolloutClient) -> list[dict[str, Any]]:
    """Of a group's ranks; empty for a single process."""
    return client.backend.rank_stats() if client.backend.options.dp_size > 1 else []


def communication(client: RolloutClient) -> Any:
    """Seconds in collectives and agreements, the mean of the ranks."""
    seconds = [rank["collective_seconds"] + rank["agreement_seconds"] for rank in rank_stats(client)]
    return statistics.mean(seconds) if seconds else None


def ratio(rounds: list[dict[str, Run]], name: str) -> list[float]:
    return [r[name].tokens_per_second / r[ONE].tokens_per_second for r in rounds]


def share(rounds: list[dict[str, Run]], name: str) -> float:
    return statistics.median(r[name].share or 0.0 for r in rounds)


def table(rounds: list[dict[str, Run]], workload: str) -> Table:
    """Medians over the rounds."""
    out = Table("variant", "tok/s", "ratio", "min", "max", "communication", title=f"small model, {workload}")
    for name in rounds[0]:
        speed = statistics.median(r[name].tokens_per_second for r in rounds)
        ratios = [f"{f(ratio(rounds, name)):.2f}" for f in (statistics.median, min, max)]
        out.add_row(name, f"{speed:.0f}", *ratios, "" if name == ONE else f"{share(rounds, name):.0%}")
    return out


def explanation(rounds: list[dict[str, Run]], memory: dict[str, list[dict[str, Any]]]) -> str:
    """Where the ratio comes from, with the figures of this run."""
    lines = [
        f"{name}: {statistics.median(ratio(rounds, name)):.2f} of one process; its ranks spend "
        f"{share(rounds, name):.0%} of the time in collectives and agreements, waiting for the other rank included."
        for name in memory
    ]
    lines.append(
        "The ranks share the arithmetic of the one process, so 2 would be perfect. Collectives take from it, and what "
        "a step costs however few its requests, which each rank pays for half of them: alltoall has three collectives "
        f"per MoE layer, allgather two with more rows. This machine has {os.cpu_count()} cores and a load average of "
        f"{os.getloadavg()[0]:.1f}: with other work on them, collectives wait for ranks that were not running. A group "
        "is for models that do not fit one process."
    )
    experts = [f"{rank['expert_bytes'] / 2**20:.0f} MiB" for rank in next(iter(memory.values()))]
    lines.append(f"Experts per rank: {', '.join(experts)}.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
