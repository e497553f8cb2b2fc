"""Arguments of the commands that look at recorded routes: compare, plot, report. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any


def add_look_commands(commands: Any) -> None:
    """Add them to the subparsers of `moe-rollout`."""
    _add_compare(commands)
    plot = commands.add_parser(
        "plot", help="pictures of expert load, entropy, reuse, drift, mismatch and steps, as PNG"
    )
    _add_sources(plot)
    plot.add_argument("--out", default="plots", metavar="DIR", help="folder for the PNG files (default: %(default)s)")
    report = commands.add_parser("report", help="one HTML page with the figures and pictures of a dataset")
    _add_sources(report)
    report.add_argument("--out", default="report.html", metavar="FILE", help="the page (default: %(default)s)")


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="routing drift: two datasets joined by sample id, or two weight versions of one"
    )
    compare.add_argument("dir", metavar="A")
    compare.add_argument("other", nargs="?", metavar="B", help="a dataset with the same sample ids")
    compare.add_argument(
        "--versions", type=int, nargs=2, metavar=("V", "W"), help="instead of B: the loads of two weight versions of A"
    )
    compare.add_argument("--top", type=positive, default=2, metavar="N", help="experts named per site (default: 2)")
    compare.add_argument("--json", action="store_true", help="every figure, for programs")


def _add_sources(command: Any) -> None:
    command.add_argument("dir", metavar="DIR")
    command.add_argument("--against", metavar="OTHER", help="also compare with this dataset, joined by sample id")
    command.add_argument(
        "--mismatch", metavar="FILE", help="also draw the comparison.json that examples/compare_replay.py wrote"
    )
    command.add_argument(
        "--timeline",
        action="append",
        default=[],
        metavar="FILE",
        help="also draw the steps that `sample --timeline FILE` wrote; may be repeated",
    )


def natural(text: str) -> int:
    """An integer from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def positive(text: str) -> int:
    """An integer from 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
