"""What a weight update costs: MB/s against a plain copy of the same bytes, and how long sampling stands still.

python -m tests.bench.bench_weights [--repeats 3] [--actors 2]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from rollout import RolloutClient, SamplingParams
from rollout.weight_transfer import buckets
from tests.bench.models import make_small

LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=0)


def seconds(work: Any, *args: Any, **kwargs: Any) -> float:
    begin = time.perf_counter()
    work(*args, **kwargs)
    return time.perf_counter() - begin


def median(work: Any, repeats: int) -> float:
    return statistics.median(seconds(work) for _ in range(repeats))


def copy_floor(state: dict[str, torch.Tensor], repeats: int) -> float:
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            target[name].copy_(tensor)

    return median(copy, repeats)


class Versions:
    """Counts up, so that each update is accepted."""

    def __init__(self) -> None:
        self.last = 0

    def update(self, client: RolloutClient, source: Any, **options: Any) -> None:
        self.last += 1
        client.update_weights(source, self.last, **options)


def stand_still(client: RolloutClient, state: dict[str, torch.Tensor], versions: Versions) -> tuple[float, float]:
    """The gap between the launches around an update that keeps 16 requests going, and the usual one; seconds."""
    prompts = [[5, 7, 9 + i] for i in range(16)]
    thread = threading.Thread(target=client.sample, args=(prompts,), kwargs={"sampling_params": LONG})
    stats = client.backend.stats  # type: ignore[attr-defined]
    begun = stats.forwards
    thread.start()
    while stats.forwards < begun + 40:
        time.sleep(0.001)
    asked = time.perf_counter()
    versions.update(client, state, in_flight="keep")
    done = time.perf_counter()
    thread.join()
    launches = [event.seconds for event in stats.events if event.kind == "launch" and event.step >= begun + 20]
    gaps = list(itertools.pairwise(launches))
    around = max(b - a for a, b in gaps if b >= asked and a <= done)
    return around, statistics.median(b - a for a, b in gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--actors", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = make_small(Path(folder))
        run(path, options.repeats, options.actors)


def run(path: str, repeats: int, actors: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state, versions = model.state_dict(), Versions()
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    floor = copy_floor(state, repeats)
    print(f"{size:.0f} MB of weights; a plain copy takes {floor * 1e3:.1f} ms, {size / floor:.0f} MB/s")
    sources = {
        "state dict": lambda: state,
        "directory": lambda: path,
        "buckets": lambda: (bucket.items() for bucket in buckets(state.items(), 16 << 20)),
    }
    with RolloutClient.local(path, dtype="float32") as client:
        for name, make in sources.items():
            took = median(lambda make=make: versions.update(client, make()), repeats)
            print(f"local, {name}: {took * 1e3:.1f} ms, {size / took:.0f} MB/s, {took / floor:.1f} copies")
        rounds = [stand_still(client, state, versions) for _ in range(repeats)]
        gap, step = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"sampling stood still for {gap * 1e3:.1f} ms, {gap / step - 1:.1f} steps of {step * 1e3:.1f} ms")
    if actors:
        with RolloutClient.ray(path, num_actors=actors, num_cpus=0.5, dtype="float32") as client:
            versions = Versions()
            took = median(lambda: versions.update(client, state), repeats)
            print(
                f"{actors} actors, state dict: {took * 1e3:.1f} ms, {size / took:.0f} MB/s, {took / floor:.1f} copies"
            )


if __name__ == "__main__":
    main()
