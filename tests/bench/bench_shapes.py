"""One shape of work at a time, each held against what this machine can do, or against a prediction.

    python -m tests.bench.bench_shapes prefill     # 2,048 prompt tokens against the rate of a matrix product
    python -m tests.bench.bench_shapes decode      # a decode step against reading its weights, keys and values once
    python -m tests.bench.bench_shapes host        # scheduler and finalize per step at batch 64
    python -m tests.bench.bench_shapes growth      # 64 to 512 waiting requests, 128 to 2,048 tokens of context
    python -m tests.bench.bench_shapes start       # RolloutClient.local in a new process: imports, loading, ours
    python -m tests.bench.bench_shapes actors      # two actors with one thread each against one with two threads

Each prints one table of medians or, with `--json`, one JSON object, and takes a minute or two on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rollout.auto_threads import candidates
from rollout.look_parser import positive
from tests.bench.growth import growth
from tests.bench.processes import actors, start
from tests.bench.steps import decode, host, prefill

Row = dict[str, Any]
COMMANDS: dict[str, Callable[[argparse.Namespace, Path], list[Row]]] = {
    "prefill": prefill,
    "decode": decode,
    "host": host,
    "growth": growth,
    "start": start,
    "actors": actors,
}


def build_parser() -> argparse.ArgumentParser:
    """The subcommands; each takes only what it uses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    threads = "compute threads, such as 1,2: a row each (default: powers of two up to the cores)"
    defaults = {"prefill": "small,mid", "decode": "mid", "host": "small", "growth": "small"}
    for name, work in COMMANDS.items():
        command = commands.add_parser(name, help=(work.__doc__ or "").splitlines()[0])
        command.add_argument("--json", action="store_true")
        command.add_argument("--repeats", type=positive, default=3)
        if name in defaults:
            command.add_argument("--sizes", default=defaults[name], metavar="LIST", help="of small,mid")
            command.add_argument("--threads", type=counts, default=candidates(), metavar="LIST", help=threads)
        if name != "start":
            batch = {"prefill": 32, "decode": 16, "growth": 16}.get(name, 64)
            command.add_argument("--batch", type=positive, default=batch)
    commands.choices["prefill"].add_argument("--tokens", type=positive, default=2048, help="in one prompt, or in all")
    for name, tokens in {"decode": 32, "host": 64, "growth": 32, "actors": 64}.items():
        commands.choices[name].add_argument("--new-tokens", type=positive, default=tokens)
    commands.choices["growth"].add_argument("--waiting", type=counts, default=[64, 512], metavar="LIST")
    commands.choices["growth"].add_argument("--context", type=counts, default=[128, 2048], metavar="LIST")
    return parser


def counts(text: str) -> list[int]:
    """`"1,2"` as `[1, 2]`."""
    return [positive(count) for count in text.split(",")]


def table(title: str, rows: list[Row]) -> Table:
    """Columns are the rows' keys; shares are in percent."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = Table(*names, title=title)
    for row in rows:
        out.add_row(*(_shown(name, row.get(name)) for name in names))
    return out


def _shown(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1%}" if "share" in name else f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def main() -> None:
    """Run one of COMMANDS."""
    options = build_parser().parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = COMMANDS[options.command](options, Path(scratch))
    if options.json:
        sys.stdout.write(json.dumps({options.command: rows}) + "\n")
    else:
        Console().print(table(options.command, rows))


if __name__ == "__main__":
    main()
