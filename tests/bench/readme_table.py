"""Write the figures of `moe-rollout bench --json` into the table of the README.

moe-rollout bench --repeats 3 --peers generate,generate_batch --json > bench.json
python -m tests.bench.readme_table bench.json "a 2-core x86-64 virtual machine"
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
TABLE = re.compile(r"(<!-- bench: .*? -->\n).*?(<!-- bench end -->)", re.DOTALL)
COLUMNS = {
    "recording / off": ("recording", "recording off"),
    "with dataset / off": ("recording + dataset", "recording off"),
    "overlap on / off": ("recording", "overlap off"),
    "`batch_invariant` / default": ("batch_invariant", "recording"),
    "/ `generate`": ("recording", "generate"),
    "/ `generate_batch`": ("recording", "generate_batch"),
}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """One row per model and batch: tokens/s, then ratios, medians over the rounds with the least and the most.

    >>> rounds = [{"recording": {"tokens_per_second": 90.0}, "recording off": {"tokens_per_second": 100.0}}]
    >>> print(table({"small B16": rounds}).splitlines()[2])
    | small B16 | 90 | 0.90 (0.90-0.90) |  |  |  |  |  |
    """
    lines = [f"| model, batch | tokens/s | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 2)]
    for name, rounds in results.items():
        rate = statistics.median(r["recording"]["tokens_per_second"] for r in rounds)
        lines.append(f"| {name} | {rate:.0f} | {' | '.join(_ratio(rounds, *of) for of in COLUMNS.values())} |")
    return "\n".join(lines) + "\n"


def _ratio(rounds: list[dict[str, Any]], a: str, b: str) -> str:
    if not {a, b} <= rounds[0].keys():
        return ""
    values = [r[a]["tokens_per_second"] / r[b]["tokens_per_second"] for r in rounds]
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    """Rewrite the README's table, and the line that says where and when."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path)
    parser.add_argument("machine")
    options = parser.parse_args()
    results = json.loads(options.json.read_text())
    rounds = len(next(iter(results.values())))
    head = f"<!-- bench: {rounds} rounds on {options.machine}, {datetime.date.today()} -->\n"
    text, count = TABLE.subn(lambda m: head + table(results) + m.group(2), README.read_text())
    if count != 1:
        raise SystemExit(f"{README} has no '<!-- bench: ... -->' with a '<!-- bench end -->' behind it")
    README.write_text(text)


if __name__ == "__main__":
    main()
