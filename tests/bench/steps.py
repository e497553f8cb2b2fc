"""Prefill, decode and the host's part of a step, as a client runs them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from torch import set_num_threads
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.bench import prompts_of
from rollout.bench_variants import check_traces, step_times
from rollout.floor import Floor, attention_of, measure_floor, prefill_flops, weight_bytes_of_a_step
from rollout.loader import no_progress_bar
from tests.bench.models import save_model

PROMPT_LEN = 64
HOST = ("schedule", "finalize", "prepare", "deliver")
Row = dict[str, Any]


class Sampled(NamedTuple):
    """One call: seconds, ms of its prefill and of a decode step, and what `client.stats()` grew by."""

    seconds: float
    prefill_ms: float
    decode_ms: float | None
    grown: dict[str, float]


@contextmanager
def opened(path: str, threads: int, batch: int, **options: Any) -> Iterator[RolloutClient]:
    """A client that records."""
    set_num_threads(threads)
    with RolloutClient.local(path, num_threads=threads, max_running_requests=batch, **options) as client:
        yield client


def sampled(client: RolloutClient, batch: int, length: int, new_tokens: int, seed: int) -> Sampled:
    """Sample once, and check that everything was made and recorded."""
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, seed=seed)
    prompts, before = prompts_of(batch, length, client.info.vocab_size), client.stats()
    begun = time.perf_counter()
    traces = client.sample(prompts, sampling_params=params)
    seconds = time.perf_counter() - begun
    check_traces("the engine", traces, batch, new_tokens, recording=True)
    events = [event for event in list(client.backend.stats.events) if event.seconds > begun]  # type: ignore[attr-defined]
    grown = {name: value - before.get(name, 0.0) for name, value in client.stats().items()}
    prefill_ms, decode_ms = step_times(events, begun, batch)
    assert prefill_ms is not None
    return Sampled(seconds, prefill_ms, decode_ms, grown)


def plain(path: str) -> Any:
    """The model as transformers loads it."""
    with no_progress_bar():
        return AutoModelForCausalLM.from_pretrained(path).eval()


def prefill(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Prompt tokens per second, and share of the rate of a square matrix product.

    The operations are two per active weight and token, and causal attention: one long prompt, and many short ones.
    """
    rows = []
    for size in options.sizes.split(","):
        path = save_model(size, scratch)
        model = plain(path)
        shapes = [(1, options.tokens), (options.batch, options.tokens // options.batch)]
        flops = [prefill_flops(model, [length] * batch) for batch, length in shapes]
        for threads in options.threads:
            floor = measure_floor(model.dtype, threads)
            with opened(path, threads, options.batch) as client:
                runs = [_prefill_ms(client, batch, length, options.repeats) for batch, length in shapes]
            floor = floor.best(measure_floor(model.dtype, threads))
            for (batch, length), needed, ms in zip(shapes, flops, runs, strict=True):
                what = {"size": size, "prompts": f"{batch} x {length}", "threads": threads}
                rows.append({**what, **_rated(batch * length, needed, ms, floor)})
    return rows


def _prefill_ms(client: RolloutClient, batch: int, length: int, repeats: int) -> float:
    return median([sampled(client, batch, length, 1, seed).prefill_ms for seed in range(repeats + 1)][1:])


def _rated(tokens: int, needed: float, ms: float, floor: Floor) -> Row:
    rates = {"tokens/s": 1e3 * tokens / ms, "GFLOP": needed / 1e9, "GFLOP/s": needed / ms / 1e6}
    return {"ms": ms, **rates, "peak GFLOP/s": floor.flops / 1e9, "share of peak": 1e3 * needed / ms / floor.flops}


def decode(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """Ms of a decode step, and share of what reading its weights, keys and values once would take."""
    rows = []
    for size in options.sizes.split(","):
        path = save_model(size, scratch)
        model = plain(path)
        weights = weight_bytes_of_a_step(model, options.batch)
        context = PROMPT_LEN + options.new_tokens / 2
        cached = options.batch * context * attention_of(model).token_bytes
        for threads in options.threads:
            floor = measure_floor(model.dtype, threads)
            with opened(path, threads, options.batch) as client:
                shape = options.batch, PROMPT_LEN, options.new_tokens
                runs = [sampled(client, *shape, seed).decode_ms for seed in range(options.repeats + 1)]
            floor = floor.best(measure_floor(model.dtype, threads))
            ms = median(run for run in runs[1:] if run is not None)
            rows.append({"size": size, "batch": options.batch, "threads": threads, **_held(ms, weights, cached, floor)})
    return rows


def _held(ms: float, weights: float, cached: float, floor: Floor) -> Row:
    least = 1e3 * floor.seconds_to_read(weights + cached)
    mb = {"weights MB": weights / 1e6, "keys, values MB": cached / 1e6, "GB/s": floor.read / 1e9}
    return {"ms": ms, **mb, "ms at least": least, "share of floor": least / ms}


def host(options: argparse.Namespace, scratch: Path) -> list[Row]:
    """The host's time per step, as shares of the step: scheduler and finalize, and what else is counted."""
    rows = []
    for size in options.sizes.split(","):
        path = save_model(size, scratch)
        for threads in options.threads:
            with opened(path, threads, options.batch) as client:
                shape = options.batch, PROMPT_LEN, options.new_tokens
                runs = [sampled(client, *shape, seed) for seed in range(options.repeats + 1)][1:]
            steps = median(1e3 * run.grown["step_seconds_total"] / run.grown["steps_total"] for run in runs)
            names = [name for name in HOST if f"{name}_seconds_total" in runs[0].grown]
            shares = {name: median(_share(run, name) for run in runs) for name in names}
            both = median(_share(run, "schedule") + _share(run, "finalize") for run in runs)
            what = {"size": size, "batch": options.batch, "threads": threads, "ms/step": steps}
            shown = {f"share {name}": share for name, share in shares.items()}
            rows.append({**what, "share schedule + finalize": both, **shown})
    return rows


def _share(run: Sampled, name: str) -> float:
    return run.grown[f"{name}_seconds_total"] / run.grown["step_seconds_total"]
