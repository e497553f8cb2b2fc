"""Arguments of the commands that look at recorded routes: compare. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any


def add_look_commands(commands: Any) -> None:
    """Add them to the subparsers of `moe-rollout`."""
    _add_compare(commands)


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


def positive(text: str) -> int:
    """An integer from 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)
