"""The tables of `moe-rollout bench`: medians, ratios within a round, shares of the time, what the machine can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Column, Table

from rollout.bench import Case
from rollout.bench_peers import PEERS
from rollout.bench_variants import SHARES, Measured
from rollout.floor import CaseFloor
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
OTHERS = (*PEERS, "vLLM, recording")


def tables(results: Mapping[str, Case]) -> list[Table]:
    """Per model and batch medians, ratios with their spread, where the time went; the floor if it was measured."""
    makers = (_table, _ratio_table, _shares_table)
    found = [table(name, case) for name, case in results.items() for table in makers]
    floors = {name: case for name, case in results.items() if case.floor is not None}
    return [table for table in (*found, _decode_floor(floors), _prefill_floor(floors)) if table.row_count]


def best_peer(case: Case) -> str | None:
    """The peer with the highest median of tokens per second; None when there was none."""
    rates = {name: median(case, name, "tokens_per_second") or 0.0 for name in OTHERS if name in case.threads}
    return max(rates, key=lambda name: rates[name]) if rates else None


def ratios(case: Case) -> dict[str, list[float]]:
    """Of each pair that was measured, the ratio in every round; the last one is to the best peer."""
    pairs = {f"{a} / {b}": (a, b) for a, b in RATIOS if {a, b} <= case.threads.keys()}
    if (peer := best_peer(case)) is not None:
        pairs[f"recording / best peer ({peer})"] = "recording", peer
    return {
        name: [r[a].tokens_per_second / r[b].tokens_per_second for r in case.rounds] for name, (a, b) in pairs.items()
    }


def median(case: Case, name: str, field: str) -> float | None:
    """Over the rounds that have the figure."""
    known = [value for r in case.rounds if (value := getattr(r[name], field)) is not None]
    return statistics.median(known) if known else None


def _new(first: str, *columns: str, title: str) -> Table:
    narrow = (Column(name, overflow="fold", justify="right") for name in columns)
    return Table(Column(first, no_wrap=True), *narrow, title=plain(title, "table.title"))


def _table(title: str, case: Case) -> Table:
    columns = "threads", "tokens/s", "min", "max", "ms/step", "first token ms", "MB added"
    peak = f"{case.peak_megabytes:.0f} MB at most in this process"
    out = _new("variant", *columns, title=f"{title}, {len(case.rounds)} rounds, {peak}")
    for name, threads in case.threads.items():
        spread = (f"{f(r[name].tokens_per_second for r in case.rounds):.0f}" for f in (statistics.median, min, max))
        others = [median(case, name, field) for field in ("step_ms", "first_token_ms")]
        memory = case.megabytes[name]
        out.add_row(name, str(threads), *spread, *map(_number, others), "" if memory is None else f"{memory:.0f}")
    return out


def _ratio_table(title: str, case: Case) -> Table:
    out = _new("ratio of tokens/s in a round", "median", "min", "max", title=title)
    for name, values in ratios(case).items():
        out.add_row(name, *(f"{f(values):.3f}" for f in (statistics.median, min, max)))
    return out


def _shares_table(title: str, case: Case) -> Table:
    parts = {name: [shares for r in case.rounds if (shares := r[name].shares)] for name in case.threads}
    parts = {name: found for name, found in parts.items() if found}
    counted = [of for of in SHARES if any(of in shares for found in parts.values() for shares in found)]
    out = _new("variant", *counted, title=f"{title}, % of the time (they overlap)")
    for name, found in parts.items():
        out.add_row(name, *(f"{100 * statistics.median(shares[of] for shares in found):.1f}" for of in counted))
    return out


def _decode_floor(results: Mapping[str, Case]) -> Table:
    """How near a decode step comes to reading each byte that it needs once."""
    return _floor_table(
        "decode", ("GB/s", "MB a step"), results, "decode_ms",
        lambda floor: (floor.machine.read / 1e9, floor.step_bytes / 1e6, floor.step_ms),
    )  # fmt: skip


def _prefill_floor(results: Mapping[str, Case]) -> Table:
    """How near the prefill comes to the rate of a square matrix product."""
    return _floor_table(
        "prefill", ("GFLOP/s", "GFLOP"), results, "prefill_ms",
        lambda floor: (floor.machine.flops / 1e9, floor.prefill_flops / 1e9, floor.prefill_ms),
    )  # fmt: skip


def _floor_table(
    what: str,
    units: tuple[str, str],
    results: Mapping[str, Case],
    field: str,
    needs: Callable[[CaseFloor], tuple[float, float, float]],
) -> Table:
    """`needs`: the machine's rate, what is needed of it, and the ms that this takes at least."""
    out = _new(what, "dtype", "threads", *units, "ms at least", "ms", "share", title="floor of this machine")
    for name, case in results.items():
        floor, took = case.floor, median(case, "recording", field)
        assert floor is not None
        rate, need, least = needs(floor)
        numbers = map(_number, (rate, need, least, took))
        out.add_row(name, floor.dtype, str(floor.threads), *numbers, _percent(_share(least, took)))
    return out


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _share(least: float, measured: float | None) -> float | None:
    return None if measured is None else least / measured


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def to_json(results: Mapping[str, Case]) -> dict[str, Any]:
    """The same for programs: of each model and batch every round, threads and memory by variant, ratios, floor."""
    return {name: _case_json(case) for name, case in results.items()}


def _case_json(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rounds": [{name: measured._asdict() for name, measured in r.items()} for r in case.rounds],
        "threads": case.threads,
        "megabytes": case.megabytes,
        "peak_megabytes": case.peak_megabytes,
        "ratios": ratios(case),
    }
    if (floor := case.floor) is not None:
        step, prefill = (median(case, "recording", field) for field in ("decode_ms", "prefill_ms"))
        machine, needs = floor.machine._asdict(), {k: v for k, v in floor._asdict().items() if k != "machine"}
        shares = {"decode_share": _share(floor.step_ms, step), "prefill_share": _share(floor.prefill_ms, prefill)}
        found["floor"] = machine | needs | shares
    return found


def from_json(found: Mapping[str, Any]) -> Case:
    """A case of `to_json`, without its floor."""
    rounds = [{name: Measured(**measured) for name, measured in r.items()} for r in found["rounds"]]
    return Case(rounds, found["threads"], found["megabytes"], found["peak_megabytes"])
