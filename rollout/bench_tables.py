"""The tables of `moe-rollout bench`: medians, ratios within a round, shares of the time, what the machine can do."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers import AutoModelForCausalLM

from rollout.bench import SHARES, BenchOptions, Round, key_of, model_path
from rollout.floor import measure_floor, weight_bytes_of_a_step
from rollout.loader import no_progress_bar
from rollout.plain import plain

RATIOS = (
    ("recording", "recording off"),
    ("recording + dataset", "recording off"),
    ("recording", "overlap off"),
    ("batch_invariant", "recording"),
    ("recording, no graphs", "recording off, no graphs"),
    ("recording, no graphs", "overlap off, no graphs"),
    ("recording", "recording, no graphs"),
    ("recording", "generate"),
    ("recording", "generate_batch"),
    ("recording", "vLLM, recording"),
)


def tables(results: dict[str, list[Round]]) -> list[Table]:
    """Per model and batch medians, then ratios with their spread; and where the time went."""
    return [
        table(name, rounds)
        for name, rounds in results.items()
        for table in (_table, _shares_table)
        if table is _table or any(measured.shares for measured in rounds[0].values())
    ]


def _table(title: str, rounds: list[Round]) -> Table:
    out = Table(
        "variant",
        "tokens/s",
        "min",
        "max",
        "ms/step",
        "first token ms",
        title=plain(f"{title}, {len(rounds)} rounds", "table.title"),
    )
    for name in rounds[0]:
        rates = [r[name].tokens_per_second for r in rounds]
        steps, firsts = [r[name].step_ms for r in rounds], [r[name].first_token_ms for r in rounds]
        out.add_row(name, *(f"{f(rates):.0f}" for f in (statistics.median, min, max)), *map(_median, (steps, firsts)))
    for a, b in RATIOS:
        if a in rounds[0] and b in rounds[0]:
            values = [r[a].tokens_per_second / r[b].tokens_per_second for r in rounds]
            out.add_row(f"{a} / {b}", *(f"{f(values):.3f}" for f in (statistics.median, min, max)))
    return out


def _shares_table(title: str, rounds: list[Round]) -> Table:
    out = Table("variant", *SHARES, title=plain(f"{title}, share of the time (they overlap)", "table.title"))
    for name in rounds[0]:
        parts = [shares for r in rounds if (shares := r[name].shares)]
        if parts:
            out.add_row(name, *(f"{statistics.median(part[of] for part in parts):.1%}" for of in SHARES))
    return out


def floor_table(options: BenchOptions, results: dict[str, list[Round]]) -> Table:
    """What the machine can do at best, and how near a step comes to reading each weight that it needs once."""
    out = Table("model", "dtype", "GB/s", "GFLOP/s", "MB a step", "ms at least", "share", title="floor of this machine")
    with tempfile.TemporaryDirectory() as scratch:
        for model in options.models:
            path = model_path(model, Path(scratch))
            with no_progress_bar():
                loaded: Any = AutoModelForCausalLM.from_pretrained(path)
            floor = measure_floor(loaded.dtype, options.threads)
            for batch in options.batches:
                key, size = key_of(path, batch), weight_bytes_of_a_step(loaded, batch)
                least = 1e3 * floor.seconds_to_read(size)
                step = statistics.median(r["recording"].step_ms or float("nan") for r in results[key])
                figures = floor.read / 1e9, floor.flops / 1e9, size / 1e6, least
                out.add_row(key, str(loaded.dtype)[6:], *(f"{x:.1f}" for x in figures), f"{least / step:.0%}")
    return out


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}" if known else ""


def to_json(results: dict[str, list[Round]]) -> dict[str, Any]:
    """The same for programs."""
    return {name: [{k: m._asdict() for k, m in r.items()} for r in rounds] for name, rounds in results.items()}
