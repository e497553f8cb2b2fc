"""`moe-rollout bench`: ratios of one run, recording on and off, overlap on and off, against transformers and vLLM.

All variants sample the same prompts in turn, so that a machine whose speed drifts slows all of them. The first round
warms up. Ratios are medians of the ratios within a round; the spread is shown.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from rollout.bench_models import save_model
from rollout.bench_vllm import sample_vllm, start_vllm_client
from rollout.client import RolloutClient
from rollout.config import EngineOptions
from rollout.loader import no_progress_bar
from rollout.sampling import SamplingParams

PEERS = ("generate", "generate_batch")
SHARES = ("model", "sample", "capture", "schedule", "prepare", "finalize", "wait")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Attributes:
        models: "small", "mid" (random, made here) or checkpoint directories.
        batches: sequences sampled together.
        peers: of PEERS, run on the same checkpoint and prompts.
        vllm: vLLM too, which must be installed.
    """

    models: Sequence[str] = ("small",)
    batches: Sequence[int] = (16, 64)
    prompt_len: int = 64
    new_tokens: int = 128
    repeats: int = 3
    threads: int = 1
    device: str = "cpu"
    peers: Sequence[str] = ("generate",)
    vllm: bool = False

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("prompt_len", "new_tokens", "repeats", "threads")}
        for name, value in [*counts.items(), *(("batches", batch) for batch in self.batches)]:
            if value < 1:
                raise ValueError(f"{name} has {value}, need at least 1")
        if not self.batches:
            raise ValueError("batches is empty; give some, such as 16,64")


class Measured(NamedTuple):
    """One variant in one round: sampled tokens per second with prefill, ms per forward, ms to the first token, and what
    share of the time went where (see SHARES; they overlap, and do not add up to 1)."""

    tokens_per_second: float
    step_ms: float | None = None
    first_token_ms: float | None = None
    shares: dict[str, float] | None = None


Round = dict[str, Measured]
Run = Callable[[int], Measured]


def run_bench(options: BenchOptions) -> dict[str, list[Round]]:
    """The rounds of every model and batch, keyed `"small B16"`."""
    torch.set_num_threads(options.threads)
    results: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            path = model_path(model, Path(scratch))
            for batch in options.batches:
                with contextlib.ExitStack() as stack:
                    runs = _variants(path, batch, options, Path(scratch), stack)
                    rounds = [
                        {name: run(number) for name, run in runs.items()} for number in range(options.repeats + 1)
                    ]
                results[key_of(path, batch)] = rounds[1:]
    return results


def model_path(model: str, scratch: Path) -> str:
    """A checkpoint: one of SHAPES, made now, or the given one."""
    return save_model(model, scratch) if model in ("small", "mid") else model


def key_of(path: str, batch: int) -> str:
    """`"small B16"`."""
    return f"{Path(path).name} B{batch}"


def _variants(
    path: str, batch: int, options: BenchOptions, scratch: Path, stack: contextlib.ExitStack
) -> dict[str, Run]:
    """By name; all stay open, so that rounds interleave."""
    prompts = [[(i * 37 + j * 11) % 4000 + 2 for j in range(options.prompt_len)] for i in range(batch)]

    def engine(**engine_options: Any) -> Run:
        client = stack.enter_context(
            RolloutClient.local(
                path,
                device=options.device,
                num_threads=options.threads,
                max_running_requests=max(options.batches),
                **engine_options,
            )
        )
        return lambda number: _sample(client, prompts, options, number)

    runs = {
        "recording": engine(),
        "recording + dataset": engine(traces=scratch / f"traces-{Path(path).name}-{batch}"),
        "recording off": engine(enable_return_routed_experts=False),
        "overlap off": engine(disable_overlap_schedule=True),
    }
    if options.device == "cpu":
        runs["batch_invariant"] = engine(batch_invariant=True)
    elif "disable_cuda_graph" in EngineOptions.model_fields:
        runs["recording, no graphs"] = engine(disable_cuda_graph=True)
        runs["recording off, no graphs"] = engine(disable_cuda_graph=True, enable_return_routed_experts=False)
        runs["overlap off, no graphs"] = engine(disable_cuda_graph=True, disable_overlap_schedule=True)
    if options.peers:
        with no_progress_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(path).eval()
            model.to(options.device)
        for peer in options.peers:
            runs[peer] = lambda number, peer=peer: _PEERS[peer](model, prompts, options)  # type: ignore[misc]
    if options.vllm:
        tokens = options.prompt_len + options.new_tokens
        vllm = stack.enter_context(start_vllm_client(path, options.device, batch, tokens))
        runs["vLLM, recording"] = lambda number: Measured(sample_vllm(vllm, prompts, options.new_tokens, number))
    return runs


def _sample(client: RolloutClient, prompts: list[list[int]], options: BenchOptions, number: int) -> Measured:
    params = SamplingParams(temperature=1.0, max_tokens=options.new_tokens, ignore_eos=True, seed=number)
    stats = client.backend.stats  # type: ignore[attr-defined]
    before, figures = stats.forwards, client.stats()
    started = time.perf_counter()
    client.sample(prompts, sampling_params=params)
    seconds = time.perf_counter() - started
    spent = {name: value - figures.get(name, 0.0) for name, value in client.stats().items()}
    first = [e.seconds for e in stats.events if e.kind == "finalize" and e.seconds > started][:1]
    return Measured(
        tokens_per_second=len(prompts) * options.new_tokens / seconds,
        step_ms=1e3 * seconds / (stats.forwards - before),
        first_token_ms=1e3 * (first[0] - started) if first else None,
        shares={name: spent[f"{name}_seconds_total"] / seconds for name in SHARES},
    )


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], options: BenchOptions) -> Measured:
    config = _generation_config(options)
    started = time.perf_counter()
    out = model.generate(torch.tensor(prompts, device=options.device), generation_config=config)
    seconds = time.perf_counter() - started
    assert out.shape == (len(prompts), options.prompt_len + options.new_tokens)
    return Measured(len(prompts) * options.new_tokens / seconds)


@torch.inference_mode()
def _generate_batch(model: Any, prompts: list[list[int]], options: BenchOptions) -> Measured:
    started = time.perf_counter()
    out = model.generate_batch(
        prompts, generation_config=_generation_config(options, eos_token_id=-1), progress_bar=False
    )
    seconds = time.perf_counter() - started
    made = sum(len(request.generated_tokens) for request in out.values())
    return Measured(made / seconds)


def _generation_config(options: BenchOptions, **more: Any) -> GenerationConfig:
    new = options.new_tokens
    return GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=True, pad_token_id=1, **more)


_PEERS: dict[str, Callable[[Any, list[list[int]], BenchOptions], Measured]] = {
    "generate": _generate,
    "generate_batch": _generate_batch,
}
