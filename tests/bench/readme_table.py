"""Write the figures of `moe-rollout bench --json` into the table of the README.

moe-rollout bench --sizes small,mid --peers generate,generate_batch --vllm --json > bench.json
python -m tests.bench.readme_table bench.json "a 2-core x86-64 virtual machine"

More than one file may be given, such as one per environment or size; a model and batch must be in one of them only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from rollout.bench import Case
from rollout.bench_tables import from_json, median, ratios

README = Path(__file__).parents[2] / "README.md"
TABLE = re.compile(r"(<!-- bench: .*? -->\n)(.*?)(<!-- bench end -->)", re.DOTALL)
RATIOS = {
    "recording / off": "recording / recording off",
    "+ dataset / off": "recording + dataset / recording off",
    "overlap on / off": "recording / overlap off",
    "`batch_invariant` / default": "batch_invariant / recording",
    "/ `generate`": "recording / generate",
    "/ `generate_batch`": "recording / generate_batch",
    "/ vLLM": "recording / vLLM, recording",
}
PEERS = ("recording", "generate", "generate_batch", "vLLM, recording")
HEADER = f"| model, batch | tokens/s | {' | '.join(RATIOS)} | threads |"


def table(results: Mapping[str, Case]) -> str:
    """One row per model and batch: tokens/s while recording, ratios (medians over the rounds, with the spread), and the
    threads of the engine and of each peer in the order of the columns.

    >>> rounds = [{"recording": Measured(90.0), "generate": Measured(60.0)}]
    >>> case = Case(rounds, {"recording": 1, "generate": 2}, {}, 0.0)
    >>> print(table({"small B16": case}).splitlines()[2])
    | small B16 | 90 |  |  |  |  | 1.50 (1.50-1.50) |  |  | 1, 2 |
    """
    lines = [HEADER, "|" + "---|" * (len(RATIOS) + 3)]
    for name, case in results.items():
        rate, found = median(case, "recording", "tokens_per_second"), ratios(case)
        cells = [_spread(found[ratio]) if ratio in found else "" for ratio in RATIOS.values()]
        threads = ", ".join(str(case.threads[peer]) for peer in PEERS if peer in case.threads)
        lines.append(f"| {name} | {rate:.0f} | {' | '.join(cells)} | {threads} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def rewritten(text: str, results: Mapping[str, Case], machine: str, date: datetime.date) -> str:
    """The README's text with another table, and another line that says where and when."""
    rounds = sorted({len(case.rounds) for case in results.values()})
    head = f"<!-- bench: {' or '.join(map(str, rounds))} rounds on {machine}, {date} -->\n"
    text, count = TABLE.subn(lambda found: head + table(results) + found.group(3), text)
    if count != 1:
        raise SystemExit(f"{README} has no '<!-- bench: ... -->' with a '<!-- bench end -->' behind it")
    return text


def main() -> None:
    """Rewrite the README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+")
    parser.add_argument("machine")
    options = parser.parse_args()
    results: dict[str, Case] = {}
    for path in options.json:
        found = {name: from_json(case) for name, case in json.loads(path.read_text()).items()}
        if doubles := results.keys() & found.keys():
            raise SystemExit(f"{path} measures {sorted(doubles)}, which an earlier file has")
        results |= found
    README.write_text(rewritten(README.read_text(), results, options.machine, datetime.date.today()))


if __name__ == "__main__":
    main()
