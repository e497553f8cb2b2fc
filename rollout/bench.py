"""`moe-rollout bench`: ratios of one run, recording on and off, overlap on and off, against transformers and vLLM.

All variants sample the same prompts in turn, so that a machine whose speed drifts slows all of them; each round begins
with another one. A round before the counted ones warms up, and finds out with how many threads each family of variants
(ours, and each peer) is fastest here. Ratios are medians of the ratios within a round; the spread is shown.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rollout.auto_threads import candidates
from rollout.bench_models import SHAPES, save_model
from rollout.bench_variants import Measured, Run, Variant, variants_of
from rollout.floor import CaseFloor, case_floor
from rollout.loader import load_config, no_progress_bar
from rollout.memory import peak_resident_bytes, resident_bytes

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        models: "small", "mid" (random, made here) or checkpoint directories.
        batches: sequences sampled together.
        threads: counts to try; "auto" tries powers of two up to the cores.
        peers: of bench_peers.PEERS, run on the same checkpoint and prompts.
        vllm: vLLM too, which must be installed.
        floor: measure what this machine can do at best, too.
    """

    models: Sequence[str] = ("small",)
    batches: Sequence[int] = (16, 64)
    prompt_len: int = 64
    new_tokens: int = 128
    repeats: int = 3
    threads: Sequence[int] | Literal["auto"] = "auto"
    device: str = "cpu"
    peers: Sequence[str] = ("generate",)
    vllm: bool = False
    floor: bool = False

    def __post_init__(self) -> None:
        given: dict[str, Sequence[int]] = {n: [getattr(self, n)] for n in ("prompt_len", "new_tokens", "repeats")}
        given["batches"], given["threads"] = self.batches, self.counts
        for name, values in given.items():
            if not values:
                raise ValueError(f"{name} is empty; give some, such as 16,64")
            if min(values) < 1:
                raise ValueError(f"{name} has {min(values)}, need at least 1")
        for name, named in (("models", self.models), ("batches", self.batches)):
            if len(set(named)) < len(named):
                raise ValueError(f"{name} names one of {list(named)} twice")

    @property
    def counts(self) -> list[int]:
        """Numbers of threads to try. On an accelerator they matter little."""
        if self.threads != "auto":
            return list(self.threads)
        return candidates() if self.device == "cpu" else [1]


Round = dict[str, Measured]


class Case(NamedTuple):
    """One model and batch: the rounds, of each variant its threads and the resident memory that it added, the most that
    this process ever had, and the floor if it was asked for."""

    rounds: list[Round]
    threads: dict[str, int]
    megabytes: dict[str, float | None]
    peak_megabytes: float
    floor: CaseFloor | None = None


def run_bench(options: BenchOptions) -> dict[str, Case]:
    """Every model and batch, keyed `"small B16"`."""
    results: dict[str, Case] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for label, model in labels(options.models).items():
            path = save_model(model, Path(scratch)) if model in SHAPES else model
            vocab_size = vocab_size_of(path)
            for batch in options.batches:
                key, prompts = f"{label} B{batch}", prompts_of(batch, options.prompt_len, vocab_size)
                traces = Path(scratch, f"traces-{len(results)}")
                case = _measure(variants_of(path, prompts, options, traces), options, key)
                floor = _floor(path, batch, options, case.threads["recording"]) if options.floor else None
                results[key] = case._replace(floor=floor)
    return results


def vocab_size_of(path: str) -> int:
    """Of the checkpoint's text model."""
    return int(load_config(path, False).get_text_config().vocab_size)


def prompts_of(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of different tokens of the vocabulary, from 2 on; more than 4,000 of them are not needed.

    >>> prompts_of(2, 4, 38)
    [[2, 13, 24, 35], [3, 14, 25, 36]]
    """
    choice = min(4000, vocab_size - 2)
    return [[(i * 37 + j * 11) % choice + 2 for j in range(length)] for i in range(batch)]


def _floor(path: str, batch: int, options: BenchOptions, threads: int) -> CaseFloor:
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(path).eval()
    return case_floor(model, batch, options.prompt_len, options.new_tokens, threads)


def labels(models: Sequence[str]) -> dict[str, str]:
    """What the tables call each model: the name of its directory, or all of its path where two end alike.

    >>> labels(["small", "a/step-3", "b/step-3"])
    {'small': 'small', 'a/step-3': 'a/step-3', 'b/step-3': 'b/step-3'}
    """
    names = [Path(model).name for model in models]
    alike = {name for name in names if names.count(name) > 1}
    return {model if name in alike or not name else name: model for name, model in zip(names, models, strict=True)}


def _measure(variants: Mapping[str, Variant], options: BenchOptions, key: str) -> Case:
    """All variants stay open, so that rounds interleave."""
    chosen: dict[str, int] = {}
    threads: dict[str, int] = {}
    megabytes: dict[str, float | None] = {}
    runs: dict[str, Run] = {}
    total = len(variants) * (options.repeats + 1)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=total, desc=key, leave=False, disable=None))
        for name, variant in variants.items():
            if variant.family not in chosen:
                chosen[variant.family] = _fastest(variant, options)
            threads[name] = variant.threads(chosen[variant.family])
            before = resident_bytes()
            runs[name] = stack.enter_context(variant.open(threads[name]))
            runs[name](0, options.new_tokens)
            after = resident_bytes()
            megabytes[name] = None if before is None or after is None else (after - before) / 1e6
            bar.update()
        rounds: list[Round] = [{} for _ in range(options.repeats)]
        for number, measured in enumerate(rounds, 1):
            for name in order(list(runs), number):
                measured[name] = runs[name](number, options.new_tokens)
                bar.update()
    return Case(rounds, threads, megabytes, peak_resident_bytes() / 1e6)


def order(names: Sequence[str], number: int) -> list[str]:
    """The variants in the order of a round: each round begins with another one.

    >>> order(["recording", "recording off", "generate"], 1)
    ['recording off', 'generate', 'recording']
    """
    first = number % len(names)
    return [*names[first:], *names[:first]]


def _fastest(variant: Variant, options: BenchOptions) -> int:
    """The number of threads with which a family samples the most tokens per second."""
    counts = options.counts
    if len(counts) == 1:
        return counts[0]
    rates = {}
    for count in counts:
        with variant.open(count) as run:
            run(0, min(WARM_UP_TOKENS, options.new_tokens))
            rates[count] = run(0, options.new_tokens).tokens_per_second
    return max(counts, key=lambda count: rates[count])
