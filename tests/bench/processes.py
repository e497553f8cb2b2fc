"""What a new process takes to start, and how actors share the cores."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from rollout import RolloutClient, SamplingParams
from rollout.bench import prompts_of
from rollout.bench_variants import check_traces
from rollout.tiny_moe import MODEL_PATH
from tests.bench.models import save_model

Row = dict[str, Any]
PROMPT_LEN = 64
THEIRS = """
import time; begun = time.perf_counter()
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
imported = time.perf_counter()
path = {path!r}
AutoConfig.from_pretrained(path); AutoTokenizer.from_pretrained(path); AutoModelForCausalLM.from_pretrained(path)
import json; print(json.dumps([imported - begun, time.perf_counter() - imported]))
"""
OURS = """
import time; begun = time.perf_counter()
from rollout import RolloutClient
client = RolloutClient.local({path!r})
took = time.perf_counter() - begun
client.close()
import json; print(json.dumps([took]))
"""


def start(options: argparse.Namespace, _: Path) -> list[Row]:
    """Seconds until RolloutClient.local has the built-in model in a new process, and where they go.

    Two processes in turn: one makes a client, one only imports torch and transformers and loads the same checkpoint's
    config, tokenizer and weights. What the first takes longer is ours.
    """
    runs = []
    for _ in range(options.repeats + 1):  # the first one reads files that the others find in memory
        (ours,), wall = run(OURS)
        (imports, loading), _ = run(THEIRS)
        runs.append((wall, wall - ours, imports, loading, ours - imports - loading))
    names = "wall s", "python s", "imports of torch and transformers s", "from_pretrained s", "ours s"
    return [dict(zip(names, map(median, zip(*runs[1:], strict=True)), strict=True))]


def run(script: str) -> tuple[list[float], float]:
    """What a script prints, and the seconds of its process."""
    begun = time.perf_counter()
    command = [sys.executable, "-c", script.format(path=str(MODEL_PATH))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    wall = time.perf_counter() - begun
    if done.returncode:
        raise RuntimeError(f"a process ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]), wall


def actors(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Tokens/s of two actors with one thread each, and of one with two threads."""
    import ray

    path = save_model("small", scratch)
    shapes = {"2 actors of 1 thread": (2, 1), "1 actor of 2 threads": (1, 2)}
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        clients = {name: _over_ray(path, *shape, options.batch) for name, shape in shapes.items()}
        rates: dict[str, list[float]] = {name: [] for name in shapes}
        for number in range(options.repeats + 1):
            for name in list(clients)[:: 1 if number % 2 else -1]:
                rates[name].append(_rate(clients[name], options, number))
        for client in clients.values():
            client.close()
    finally:
        ray.shutdown()
    two, one = ([*rates.values()][index][1:] for index in range(2))
    ratio = median(a / b for a, b in zip(two, one, strict=True))
    found = {name: median(kept[1:]) for name, kept in rates.items()}
    return [{"batch": options.batch, **{f"{n}: tokens/s": rate for n, rate in found.items()}, "ratio": ratio}]


def _over_ray(path: str, num_actors: int, threads: int, batch: int) -> RolloutClient:
    sizes = {"num_threads": threads, "max_running_requests": -(-batch // num_actors)}
    return RolloutClient.ray(path, num_actors=num_actors, num_cpus=1, **sizes)


def _rate(client: RolloutClient, options: argparse.Namespace, seed: int) -> float:
    params = SamplingParams(temperature=1.0, max_tokens=options.new_tokens, ignore_eos=True, seed=seed)
    prompts = prompts_of(options.batch, PROMPT_LEN, client.info.vocab_size)
    begun = time.perf_counter()
    traces = client.sample(prompts, sampling_params=params)
    seconds = time.perf_counter() - begun
    check_traces("an actor", traces, options.batch, options.new_tokens, recording=True)
    return options.batch * options.new_tokens / seconds
