"""The commands of `moe-rollout`, but for the demo. Tables go to the terminal, data to stdout."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from rollout.look import compare as compare
from rollout.look_parser import positive
from rollout.plot import plot as plot
from rollout.plot import report as report
from storage import TraceDataset, repair_dataset, verify_dataset
from storage.summary import summarise


def demo(options: argparse.Namespace) -> int:
    """See rollout/demo.py."""
    from rollout.demo import run_demo

    run_demo(options.out, Console())
    return 0


def sample(options: argparse.Namespace) -> int:
    """Sample each prompt and print one JSON object per completion, in prompt order."""
    from rollout.client import RolloutClient
    from rollout.sampling import SamplingParams
    from rollout.timeline import write_timeline

    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        seed=options.seed,
        stop=tuple(options.stop),
    )
    prompts = read_prompts(options.prompts)
    if options.timeline and options.num_actors:
        raise ValueError("--timeline times the engine of this process; leave --num-actors out")
    if options.timeline:
        Path(options.timeline).open("a").close()  # what cannot be written fails before anything is sampled
    arguments: dict[str, Any] = {"traces": options.traces, "dtype": options.dtype}
    if options.num_actors:
        client = RolloutClient.ray(options.model, num_actors=options.num_actors, **arguments)
    else:
        client = RolloutClient.local(options.model, **arguments)
    with client:
        traces = client.sample(prompts, num_samples=options.num_samples, sampling_params=params)
        if options.timeline:
            write_timeline(client.backend.stats.events, options.timeline)  # type: ignore[attr-defined]
    for trace in traces:
        record = {
            "sample_id": trace.sample_id,
            "text": trace.text,
            "completion_ids": trace.completion_ids,
            "finish_reason": trace.finish_reason,
            "logprob": round(float(trace.logprobs.sum()), 4),
            "error": trace.error,
        }
        sys.stdout.write(json.dumps({key: value for key, value in record.items() if value is not None}) + "\n")
    return int(any(trace.finish_reason == "error" for trace in traces))


def read_prompts(source: str) -> list[Any]:
    """Prompts of a file or, for "-", of stdin: one per line; in a `.jsonl` file, objects with `prompt` or `prompt_ids`.

    Raises:
        ValueError: the file is missing or holds no prompts, or a line does not fit, with its number.
    """
    if source == "-":
        lines = sys.stdin.read().split("\n")
    elif Path(source).exists() and not Path(source).is_dir():  # a pipe will do
        lines = Path(source).read_text(encoding="utf-8").split("\n")
    else:
        raise ValueError(f"prompts file {source!r} does not exist")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{source!r} holds no prompts; give one per line")
    return [_json_prompt(source, number, line) if source.endswith(".jsonl") else line for number, line in numbered]


def _json_prompt(source: str, number: int, line: str) -> Any:
    try:
        row = json.loads(line)
        return row["prompt"] if "prompt" in row else row["prompt_ids"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{source} line {number}: need an object with 'prompt' or 'prompt_ids', got {line:.60}"
        ) from error


def families(options: argparse.Namespace) -> int:
    """Print how each model family is served."""
    from rollout.families import family_table

    Console().print(family_table())
    return 0


def bench(options: argparse.Namespace) -> int:
    """See rollout/bench.py."""
    from rollout.bench import BenchOptions, run_bench
    from rollout.bench_peers import PEERS
    from rollout.bench_tables import tables, to_json
    from rollout.vllm_in_process import require_vllm

    peers = [name for name in options.peers.split(",") if name]
    if unknown := set(peers) - set(PEERS):
        raise ValueError(f"peers {sorted(unknown)} are unknown; choose among {list(PEERS)}")
    if options.floor and options.device != "cpu":
        raise ValueError(f"--floor measures the CPU; leave it out, or --device {options.device}")
    chosen = BenchOptions(
        models=options.model or options.sizes.split(","),
        batches=_counts(options.batches),
        prompt_len=options.prompt_len,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
        threads="auto" if options.threads == "auto" else _counts(options.threads),
        device=options.device,
        peers=peers,
        vllm=options.vllm,
        floor=options.floor,
    )
    if options.vllm:
        require_vllm()
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():  # vLLM logs to stdout
        results = run_bench(chosen)
    if options.json:
        sys.stdout.write(json.dumps(to_json(results)) + "\n")
    else:
        for table in tables(results):
            Console().print(table)
    return 0


def _counts(text: str) -> list[int]:
    return [positive(count) for count in text.split(",") if count]


def inspect(options: argparse.Namespace) -> int:
    """Print what a dataset holds, as tables or, with `--json`, as one JSON object."""
    from rollout.dataset_tables import dataset_tables

    figures = summarise(TraceDataset(options.dir), options.step, slowest=options.slowest)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return 0
    for table in dataset_tables(figures):
        Console().print(table)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Print each problem of a dataset on a line; exit code 1 when there is one."""
    if options.all_hosts and not options.repair:
        raise ValueError("--all-hosts says whose remains --repair removes: give both, or neither")
    if options.repair:
        for path in repair_dataset(options.dir, all_hosts=options.all_hosts):
            sys.stderr.write(f"removed {path}\n")
    problems = verify_dataset(options.dir)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stderr.write(f"{options.dir}: {len(problems)} problems\n")
    return int(bool(problems))


def archive(options: argparse.Namespace) -> int:
    """Rewrite the steps before `--before` in the archive layout; see `TraceDataset.archive`."""
    dataset = TraceDataset(options.dir)
    for pack in dataset.archive(options.before):
        sys.stderr.write(f"{options.dir}/{pack}\n")
    return 0


def export(options: argparse.Namespace) -> int:
    """Write the traces of a dataset, or of one step, in a trainer's format; see `storage.convert.export_file`."""
    from storage.convert import export_file

    dataset = TraceDataset(options.dir)
    traces = list(dataset.iter(step=options.step))
    kept = [trace for trace in traces if trace.route_len or not options.skip_unrecorded]
    layers = {"num_layers": options.num_layers, "moe_only": options.moe_only}
    export_file(kept, dataset.spec, to=options.to, out=options.out, **layers)
    sys.stderr.write(f"{options.out}: {len(kept)} of {len(traces)} samples as {options.to}\n")
    return 0
