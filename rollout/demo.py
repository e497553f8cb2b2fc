"""`moe-rollout demo`: the whole path on the built-in model, offline, in well under a minute.

Sample in bfloat16, commit, verify, then replay the traces into a float32 training forward and compare.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from rollout.client import RolloutClient
from rollout.loader import no_progress_bar
from rollout.replay import ReplayReport, RouterReplay
from rollout.sampling import SamplingParams
from rollout.tiny_moe import MAX_ANSWER_TOKENS, MODEL_PATH, exact_match, problems
from storage import ReplayBatch, Trace, TraceDataset

NUM_PROMPTS, NUM_SAMPLES = 100, 4


@dataclass(frozen=True)
class Mismatch:
    """|log-probability of the trainer - of the sampler| of sampled tokens, without and with replay."""

    native: np.ndarray
    replayed: np.ndarray
    report: ReplayReport


def run_demo(out: str, console: Console) -> None:
    """Run all steps and print the table. `out` may hold earlier demos: a new step is added."""
    traces, seconds = sample_sums(out)
    dataset = TraceDataset(out)
    found = dataset.verify()
    mismatch = replay_mismatch(list(dataset.iter(step=traces[0].step)), dataset)
    console.print(_table(traces, seconds, dataset, found, mismatch))
    console.print(f"dataset: {Path(out).resolve()}", soft_wrap=True, markup=False)
    console.print(f"next:    moe-rollout inspect {out}", soft_wrap=True, markup=False)
    if found:
        raise RuntimeError(f"the dataset has {len(found)} problems, first: {found[0]}")


def sample_sums(out: str) -> tuple[list[Trace], float]:
    """Sample held-out sums with rewards into a new step of `out`; the traces and the seconds it took."""
    sums = problems(NUM_PROMPTS, seed=0, split="test")
    params = SamplingParams(temperature=1.0, max_tokens=MAX_ANSWER_TOKENS, seed=0)
    with RolloutClient.local(MODEL_PATH, dtype="bfloat16", traces=out, reward_fn=_reward) as client:
        started = time.perf_counter()
        stream = client.stream(
            [problem.prompt for problem in sums],
            num_samples=NUM_SAMPLES,
            sampling_params=params,
            metadata=[{"answer": problem.answer} for problem in sums],
        )
        total = NUM_PROMPTS * NUM_SAMPLES
        traces = list(tqdm(stream, total=total, desc="sampling", unit="sample", disable=not sys.stderr.isatty()))
        return traces, time.perf_counter() - started


def _reward(trace: Trace) -> float:
    return exact_match(trace.text, trace.metadata["answer"])


@torch.no_grad()
def replay_mismatch(traces: list[Trace], dataset: TraceDataset) -> Mismatch:
    """Forward the traces in float32, as a trainer would, with its own routes and with the recorded ones."""
    with no_progress_bar():
        model: Any = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
    batch = ReplayBatch.collate(traces, spec=dataset.spec)
    replay = RouterReplay(model)

    def difference() -> np.ndarray:
        logprobs = batch.token_logprobs(model(**batch.model_inputs()).logits).numpy()
        return np.abs(logprobs - batch.logprobs)[batch.completion_mask]

    native = difference()
    with replay(batch):
        replayed = difference()
    return Mismatch(native, replayed, replay.report())


def _table(traces: list[Trace], seconds: float, dataset: TraceDataset, found: list[Any], mismatch: Mismatch) -> Table:
    tokens = sum(len(trace.completion_ids) for trace in traces)
    rows = sum(trace.route_len for trace in traces)
    size = sum(file.stat().st_size for file in dataset.root.glob("*-*/*.parquet"))
    all_tokens = sum(len(trace.token_ids) for trace in dataset.iter())
    report, spec = mismatch.report, dataset.spec
    table = Table("", "", title="moe-rollout demo", show_header=False)
    table.add_row(
        "sampled",
        f"{len(traces)} completions of {NUM_PROMPTS} held-out sums, {tokens / seconds:.0f} tokens/s",
    )
    table.add_row("correct", f"{np.mean([trace.reward or 0.0 for trace in traces]):.1%} at temperature 1")
    table.add_row("routes recorded", f"{rows} rows of {spec.num_sites} routers x top {spec.top_k}")
    table.add_row(
        "on disk",
        f"{size / all_tokens:.0f} bytes per token, {spec.row_bytes} of them routes before compression",
    )
    table.add_row("verified", "no problems" if not found else f"{len(found)} problems")
    table.add_row(
        "replayed",
        f"{report.sites_used} of {report.num_sites} routers; {report.flipped_share:.2%} of live choices differed",
    )
    table.add_row(
        "trainer against sampler",
        f"max |dlogp| {mismatch.native.max():.4f} native, {mismatch.replayed.max():.4f} replayed",
    )
    table.add_row("", f"mean |dlogp| {mismatch.native.mean():.5f} native, {mismatch.replayed.mean():.5f} replayed")
    return table
