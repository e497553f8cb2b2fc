"""Run examples/grpo.py with and without replay over several seeds and write what differed.

    python examples/compare_replay.py --out runs/compare --seeds 0 1 2      # two runs per seed
    python examples/compare_replay.py --out runs/compare --table            # only print what was written

Writes comparison.json (every step of every run), comparison.md and comparison.png (matplotlib) into --out. All other
arguments are those of grpo.py.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpo
import numpy as np

ROWS = {
    "k3 KL, trainer against sampler": ("k3", "{:.1e}"),
    "tokens outside the clip range": ("clipped", "{:.2%}"),
    "tokens with |dlogp| > ln 2": ("above_ln2", "{:.2%}"),
    "largest |dlogp| of a batch, mean": ("max_abs", "{:.2f}"),
}


def compare(recipe: grpo.Recipe, seeds: list[int], out: Path) -> None:
    """Run what is missing in `out`: an interrupted comparison goes on."""
    out.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for on in (True, False):
            file = out / f"seed{seed}-{'replay' if on else 'native'}.json"
            if not file.exists():
                chosen = replace(recipe, seed=seed, replay=on)
                history = grpo.run(chosen)
                print(grpo.summary(chosen, history), flush=True)
                file.write_text(json.dumps({"recipe": asdict(chosen), "history": asdict(history)}))


def load(out: Path) -> dict[bool, list[dict[str, Any]]]:
    """The histories in `out`, by whether replay was on."""
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for file in sorted(out.glob("seed*.json")):
        found = json.loads(file.read_text())
        runs[found["recipe"]["replay"]].append(found["history"])
    return runs


def acting(history: dict[str, Any], on: bool) -> list[dict[str, float]]:
    """The mismatch that the run's own loss saw."""
    return history["replayed"] if on else history["native"]


def table(runs: dict[bool, list[dict[str, Any]]]) -> str:
    """Markdown; means over all steps of all seeds, accuracies with their range over the seeds."""
    lines = [f"| mean of {len(runs[True])} seeds | replay off | replay on |", "|---|---|---|"]
    for title, (name, form) in ROWS.items():
        values = [
            np.mean([mismatch[name] for history in runs[on] for mismatch in acting(history, on)])
            for on in (False, True)
        ]
        lines.append(f"| {title} | {' | '.join(form.format(v) for v in values)} |")
    flips = [np.mean([np.mean(history["flipped_tokens"]) for history in runs[on]]) for on in (False, True)]
    lines.append(f"| tokens with a flipped layer | {' | '.join(f'{v:.1%}' for v in flips)} |")
    for kind in ("greedy", "sampled"):
        lines.append(f"| exact match, {kind} | {' | '.join(_accuracy(runs[on], kind) for on in (False, True))} |")
    steps = [np.mean([len(history["reward"]) for history in runs[on]]) for on in (False, True)]
    lines.append(f"| steps | {steps[0]:.0f} | {steps[1]:.0f} |")
    return "\n".join(lines)


def _accuracy(histories: list[dict[str, Any]], kind: str) -> str:
    ends = [history[kind][-1][1] for history in histories]
    start = np.mean([history[kind][0][1] for history in histories])
    return f"{start:.3f} -> {np.mean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"


def plot(runs: dict[bool, list[dict[str, Any]]], file: Path) -> None:
    """Mismatch and reward over the steps, one thin line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    for on, colour in ((False, "tab:red"), (True, "tab:blue")):
        for i, history in enumerate(runs[on]):
            label = f"replay {'on' if on else 'off'}" if i == 0 else None
            style = {"color": colour, "label": label, "alpha": 0.8, "linewidth": 1}
            left.plot(_smooth([m["k3"] for m in acting(history, on)]), **style)
            middle.plot(_smooth([100 * m["clipped"] for m in acting(history, on)]), **style)
            right.plot(_smooth(history["reward"]), **style)
    left.set(title="KL of trainer against sampler (k3)", yscale="log", ylabel="nats per token")
    middle.set(title="Tokens outside the clip range", ylabel="% of sampled tokens")
    right.set(title="Reward", ylabel="share of right answers")
    for axes in (left, middle, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=80)


def _smooth(values: list[float], width: int = 10) -> np.ndarray:
    return np.convolve(values, np.ones(width) / width, mode="valid") if len(values) >= width else np.array(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen, rest = parser.parse_known_args()
    if not chosen.table:
        compare(grpo.parse(rest), chosen.seeds, chosen.out)
    runs = load(chosen.out)
    if not runs[True] or not runs[False]:
        parser.error(f"{chosen.out} has no runs of both kinds; leave --table out to make them")
    (chosen.out / "comparison.json").write_text(json.dumps(runs))
    (chosen.out / "comparison.md").write_text(table(runs) + "\n")
    plot(runs, chosen.out / "comparison.png")
    print(table(runs))


if __name__ == "__main__":
    main()
