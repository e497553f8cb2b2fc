"""The tables that `moe-rollout inspect` prints, from the figures of storage/summary.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from rollout.plain import plain

STEPS_SHOWN = 12


def dataset_tables(figures: dict[str, Any]) -> Iterator[Table]:
    """Overview, steps, routers and the slowest samples; a dataset without samples has the overview only.

    >>> for table in dataset_tables(summarise(TraceDataset("traces/"))): Console().print(table)
    """
    yield _overview(figures)
    if figures["samples"]:
        yield _steps(figures["by_step"])
        yield _sites(figures["sites"])
    if figures["slowest"]:
        yield _slowest(figures["slowest"])


def _overview(figures: dict[str, Any]) -> Table:
    table = Table("figure", "value", title=plain(f"dataset {figures['dataset']}", "table.title"))
    for name, value in _lines(figures):
        table.add_row(name, plain(value))
    return table


def _lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    steps, tokens, rows = figures["steps"], figures["tokens"], figures["rows"]
    span = f"{steps['count']} ({steps['first']} to {steps['last']})" if steps["count"] else "none"
    yield "steps", span
    yield "samples", f"{figures['samples']:,} of {figures['groups']:,} prompts"
    yield "tokens", f"{tokens['all']:,}: {tokens['prompt']:,} prompt, {tokens['completion']:,} completion"
    yield "completion tokens per sample", _moments(figures["completion_tokens_per_sample"], ".1f")
    yield "finish reasons", ", ".join(f"{name} {count:,}" for name, count in figures["finish_reasons"].items()) or "-"
    yield "weight versions", _versions(figures["weight_versions"])
    yield "reward", _moments(figures["rewards"], ".3f")
    yield "seconds per sample", _moments(figures["seconds_per_sample"], ".3f")
    yield "recorded rows", f"{rows['recorded']:,} of {rows['expected']:,}"
    yield "missing rows", f"{rows['missing']:,}; {rows['samples_without_routes']:,} samples without routes"
    yield "routers", _routers(figures)
    if figures["bytes"] is not None:
        each = f"{figures['bytes_per_token']:.1f}" if figures["bytes_per_token"] is not None else "-"
        yield "in the files", f"{figures['bytes'] / 1e6:,.2f} MB, {each} bytes per token with everything"
    if not figures["frozen_recompute"]:
        yield "frozen_recompute", "false: routes of recomputed rows are not those of sampling time"
    if figures["slot_order"] != "transformers":
        yield "slot_order", f"{figures['slot_order']}: the ids of a row may come in another order than transformers'"


def _moments(figures: dict[str, Any] | None, form: str) -> str:
    if figures is None:
        return "none recorded"
    if not figures["count"]:
        return f"{figures['not_finite']:,} samples, none of them finite"
    mean, std, low, high = (format(figures[name], form) for name in ("mean", "std", "min", "max"))
    others = f", {figures['not_finite']:,} not finite" if figures["not_finite"] else ""
    return f"mean {mean}, std {std}, {low} to {high}, of {figures['count']:,} samples{others}"


def _versions(versions: list[dict[str, int]]) -> str:
    shown = ", ".join(f"{each['version']} ({each['rows']:,} rows)" for each in versions[-4:]) or "none"
    return f"{len(versions)}, the last: {shown}" if len(versions) > 4 else shown


def _routers(figures: dict[str, Any]) -> str:
    sites = figures["sites"]
    top_k = max(site["top_k"] for site in sites)
    return f"{len(sites)} sites, top {top_k}, {figures['route_bytes_per_token']} bytes per token before compression"


def _steps(steps: list[dict[str, Any]]) -> Table:
    title = "steps" if len(steps) <= STEPS_SHOWN else f"steps, the last {STEPS_SHOWN} of {len(steps)}"
    table = _numbers("step", "samples", "tokens", "mean reward", "missing rows", title=title)
    for step in steps[-STEPS_SHOWN:]:
        reward = "-" if step["reward"] is None else f"{step['reward']:.3f}"
        counts = (f"{step[name]:,}" for name in ("samples", "tokens"))
        table.add_row(str(step["step"]), *counts, reward, f"{step['missing_rows']:,}")
    return table


def _sites(sites: list[dict[str, Any]]) -> Table:
    alone = len({site["layer"] for site in sites}) == len(sites)
    first = "layer" if alone else "router"
    table = _numbers(first, "experts", "load entropy", "busiest expert", "its load / mean", "never chosen")
    table.title = "routers (entropy 1: all experts equally often)"
    for site in sites:
        name = plain(str(site["layer"]) if alone else site["site"].removeprefix("model.layers."))
        if site["choices"]:
            balance = f"{site['load_entropy']:.3f}", str(site["busiest_expert"]), f"{site['busiest_over_mean']:.2f}"
            table.add_row(name, f"{site['num_experts']} top {site['top_k']}", *balance, str(site["idle_experts"]))
        else:
            table.add_row(name, f"{site['num_experts']} top {site['top_k']}", "-", "-", "-", "-")
    return table


def _slowest(samples: list[dict[str, Any]]) -> Table:
    table = _numbers("sample", "seconds", "tokens", "completion", "end", title="slowest samples")
    for sample in samples:
        counts = (f"{sample[name]:,}" for name in ("tokens", "completion_tokens"))
        table.add_row(plain(sample["sample_id"]), f"{sample['seconds']:.3f}", *counts, sample["finish_reason"])
    return table


def _numbers(first: str, *columns: str, title: str | None = None) -> Table:
    table = Table(title=title)
    table.add_column(first, no_wrap=True, overflow="fold")  # the others give way, ids stay in one piece
    for column in columns:
        table.add_column(column, justify="right")
    return table
