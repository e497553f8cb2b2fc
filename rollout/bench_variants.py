"""What `moe-rollout bench` compares: our engine in several ways, and the peers. Each samples the same prompts."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import set_num_threads

from rollout.bench_peers import open_peer
from rollout.bench_vllm import open_vllm
from rollout.client import RolloutClient
from rollout.engine_stats import StepEvent
from rollout.sampling import SamplingParams
from storage.trace import Trace

if TYPE_CHECKING:
    from rollout.bench import BenchOptions

SHARES = ("model", "sample", "capture", "schedule", "prepare", "finalize", "wait", "deliver", "encode", "commit")
INVARIANT_THREADS = 2  # see EngineOptions


class Measured(NamedTuple):
    """One variant in one round: sampled tokens per second with prefill, ms per forward, ms to the first token, what
    share of the time went where (see SHARES; they overlap, and do not add up to 1), ms from the call until all prompts
    are computed, and ms per step from there on."""

    tokens_per_second: float
    step_ms: float | None = None
    first_token_ms: float | None = None
    shares: dict[str, float] | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None


Run = Callable[[int, int], Measured]
"""`(number of the round, new tokens) ->`"""


class Variant(NamedTuple):
    """One row of the table.

    Attributes:
        family: variants of a family share a number of threads, found with the first of them.
        open: with so many threads; what is open samples.
        most_threads: of which it takes no more.
    """

    family: str
    open: Callable[[int], AbstractContextManager[Run]]
    most_threads: int | None = None

    def threads(self, count: int) -> int:
        """How many of `count` it takes."""
        return count if self.most_threads is None else min(count, self.most_threads)


def variants_of(path: str, prompts: list[list[int]], options: BenchOptions, traces: Path) -> dict[str, Variant]:
    """By name, in the order of the table."""

    def ours(most_threads: int | None = None, **engine_options: Any) -> Variant:
        sizes = {"device": options.device, "max_running_requests": max(options.batches)}
        return Variant("ours", partial(_engine, path, prompts, {**sizes, **engine_options}), most_threads)

    variants = {
        "recording": ours(),
        "recording + dataset": ours(traces=traces),
        "recording off": ours(enable_return_routed_experts=False),
        "overlap off": ours(disable_overlap_schedule=True),
    }
    if options.device == "cpu":
        variants["batch_invariant"] = ours(INVARIANT_THREADS, batch_invariant=True)
    else:
        variants["recording, no graphs"] = ours(disable_cuda_graph=True)
        variants["recording off, no graphs"] = ours(disable_cuda_graph=True, enable_return_routed_experts=False)
        variants["overlap off, no graphs"] = ours(disable_cuda_graph=True, disable_overlap_schedule=True)
    for peer in options.peers:
        variants[peer] = Variant(peer, partial(_peer, peer, path, prompts, options.device))
    if options.vllm:
        variants["vLLM, recording"] = Variant("vLLM", partial(_vllm, path, prompts, options))
    return variants


@contextlib.contextmanager
def _engine(path: str, prompts: list[list[int]], engine_options: dict[str, Any], threads: int) -> Iterator[Run]:
    set_num_threads(threads)  # threads that start now take it over, whatever vLLM made of torch.set_num_threads
    recording = engine_options.get("enable_return_routed_experts", True)
    with RolloutClient.local(path, num_threads=threads, **engine_options) as client:
        yield lambda number, new_tokens: _sample(client, prompts, new_tokens, number, recording)


@contextlib.contextmanager
def _peer(peer: str, path: str, prompts: list[list[int]], device: str, threads: int) -> Iterator[Run]:
    with open_peer(peer, path, device) as generate:

        def run(number: int, new_tokens: int) -> Measured:
            set_num_threads(threads)
            started = time.perf_counter()
            made = generate(prompts, new_tokens, number)
            seconds = time.perf_counter() - started
            check_counts(peer, made, len(prompts), new_tokens)
            return Measured(len(prompts) * new_tokens / seconds)

        yield run


@contextlib.contextmanager
def _vllm(path: str, prompts: list[list[int]], options: BenchOptions, threads: int) -> Iterator[Run]:
    tokens = options.prompt_len + options.new_tokens
    with open_vllm(path, options.device, len(prompts), tokens, threads) as client:

        def run(number: int, new_tokens: int) -> Measured:
            traces, seconds = _timed(client, prompts, new_tokens, number)
            check_traces("vLLM", traces, len(prompts), new_tokens, recording=True)
            return Measured(len(prompts) * new_tokens / seconds)

        yield run


def _timed(client: RolloutClient, prompts: list[list[int]], new_tokens: int, number: int) -> tuple[list[Trace], float]:
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, seed=number)
    started = time.perf_counter()
    traces = client.sample(prompts, sampling_params=params)
    return traces, time.perf_counter() - started


def _sample(client: RolloutClient, prompts: list[list[int]], new_tokens: int, number: int, recording: bool) -> Measured:
    stats = client.backend.stats  # type: ignore[attr-defined]
    before, figures, started = stats.forwards, client.stats(), time.perf_counter()
    traces, seconds = _timed(client, prompts, new_tokens, number)
    check_traces("the engine", traces, len(prompts), new_tokens, recording)
    spent = {name: value - figures.get(name, 0.0) for name, value in client.stats().items()}
    events = [event for event in list(stats.events) if event.seconds > started]
    first = [event.seconds for event in events if event.kind == "finalize"][:1]
    return Measured(
        len(prompts) * new_tokens / seconds,
        1e3 * seconds / (stats.forwards - before),
        1e3 * (first[0] - started) if first else None,
        {name: spent[key] / seconds for name in SHARES if (key := f"{name}_seconds_total") in spent},
        *step_times(events, started, len(prompts)),
    )


def step_times(events: Sequence[StepEvent], started: float, batch: int) -> tuple[float | None, float | None]:
    """Ms until the last step with prompts in it was done, and the median of the ms between the steps behind it; None
    where the engine's log of events no longer reaches back so far."""
    launched = [event for event in events if event.kind == "launch"]
    finalized = {event.step: event.seconds for event in events if event.kind == "finalize"}
    if not launched or len(finalized) > len(launched):
        return None, None
    last = max((event.step for event in launched if event.tokens > batch), default=launched[0].step)
    ends = [seconds for step, seconds in sorted(finalized.items()) if step >= last]
    gaps = sorted(after - before for before, after in itertools.pairwise(ends))
    decode = 1e3 * gaps[len(gaps) // 2] if gaps else None
    return 1e3 * (finalized[last] - started), decode


def check_counts(who: str, made: Sequence[Sequence[int]], batch: int, new_tokens: int) -> None:
    """RuntimeError unless there are `batch` completions of `new_tokens` tokens."""
    counts = [len(tokens) for tokens in made]
    if counts != [new_tokens] * batch:
        raise RuntimeError(f"{who} made completions of {counts} tokens, need {batch} of {new_tokens}")


def check_traces(who: str, traces: Sequence[Trace], batch: int, new_tokens: int, recording: bool) -> None:
    """RuntimeError unless each trace has its tokens, no error, and all its routes or, with recording off, none."""
    for trace in traces:
        if trace.error is not None:
            raise RuntimeError(f"{who} failed in {trace.sample_id}: {trace.error}")
    check_counts(who, [trace.completion_ids for trace in traces], batch, new_tokens)
    for trace in traces:
        wanted = len(trace.token_ids) - 1 if recording else 0
        rows = 0 if trace.routed_experts is None else len(trace.routed_experts)
        if rows != wanted or trace.route_start or (trace.route_valid is not None and not trace.route_valid.all()):
            raise RuntimeError(f"{who} recorded {rows} rows of {trace.sample_id}, need {wanted}, all of them valid")
