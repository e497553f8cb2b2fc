"""Pictures of runs, from files beside a dataset: mismatch with and without replay, and the engine's steps in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rollout import canvas
from rollout.canvas import Picture
from rollout.timeline import StepSpan, hidden_share, host_work, read_timeline, typical_window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW_STEPS = 14
SMOOTHED = 10
LOOKS = {"false": ("replay off", canvas.ORANGE), "true": ("replay on", canvas.BLUE)}


class Curves(NamedTuple):
    """One run of examples/grpo.py, per training step: k3 in nats per token, share of clipped tokens, mean reward."""

    k3: list[float]
    clipped: list[float]
    reward: list[float]


def read_comparison(path: str | Path) -> dict[str, list[Curves]]:
    """The runs in `comparison.json` of examples/compare_replay.py, by whether replay was on: "false" or "true".

    The mismatch is that which the run's own loss saw: under replay with it, native without.

    Raises:
        ValueError: the file does not exist, or is none of those.
    """
    if not Path(path).is_file():
        raise ValueError(f"comparison {str(path)!r} does not exist; examples/compare_replay.py writes comparison.json")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        runs = {
            on: [_curves(run, seen) for run in found[on]] for on, seen in (("false", "native"), ("true", "replayed"))
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no comparison.json of examples/compare_replay.py: {error!r}") from error
    if not all(runs.values()):
        raise ValueError(f"{path} has {len(runs['false'])} runs without replay and {len(runs['true'])} with it")
    return runs


def _curves(run: dict[str, Any], seen: str) -> Curves:
    return Curves([m["k3"] for m in run[seen]], [m["clipped"] for m in run[seen]], run["reward"])


def mismatch(path: str | Path) -> Picture:
    """KL, clipped tokens and reward over the steps of training runs with replay and without."""
    runs = read_comparison(path)
    return Picture(
        "mismatch",
        "Mismatch with and without replay",
        f"Trainer against sampler over the steps of training: {len(runs['false'])} runs without replay, "
        f"{len(runs['true'])} with it, one thin line each and their mean; running means over {SMOOTHED} steps.",
        lambda: _draw_mismatch(runs),
    )


def _draw_mismatch(runs: dict[str, list[Curves]]) -> Figure:
    figure = canvas.new_figure(canvas.WIDTH, 3.8)
    k3, clipped, reward = figure.subplots(1, 3)
    for on, (label, colour) in LOOKS.items():
        for axes, name in ((k3, "k3"), (clipped, "clipped"), (reward, "reward")):
            curves = [getattr(run, name) for run in runs[on]]
            for curve in curves:
                axes.plot(*smooth(curve, SMOOTHED), color=colour, linewidth=0.8, alpha=0.45)
            mean = np.mean([curve[: min(map(len, curves))] for curve in curves], axis=0)
            axes.plot(*smooth(mean, SMOOTHED), color=colour, linewidth=2.2, label=label)
    k3.set(title="KL (k3)", yscale="log", ylabel="nats per token")
    clipped.set(title="Outside the clip range", ylabel="sampled tokens")
    canvas.percent(clipped.yaxis)
    reward.set(title="Reward", ylabel="mean reward")
    for axes in (k3, clipped, reward):
        axes.set_xlabel("training step")
        axes.grid(True)
        canvas.whole_numbers(axes.xaxis)
    figure.legend(*reward.get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def smooth(values: Sequence[float] | np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Running mean over `width` values, after the step that it ends with; shorter series as they are.

    >>> [part.tolist() for part in smooth([1.0, 2.0, 6.0], 2)]
    [[1, 2], [1.5, 4.0]]
    """
    if len(values) < width:
        return np.arange(len(values)), np.array(values)
    return np.arange(width - 1, len(values)), np.convolve(values, np.ones(width) / width, "valid")


def timeline(paths: Sequence[str | Path]) -> Picture:
    """Some typical steps of each file in time, one panel per file."""
    windows = {str(path): _window(path) for path in paths}
    return Picture(
        "timeline",
        "Steps in time",
        "A bar is a step, from its launch to when its results are on the host; the number is the step's. Orange is the "
        "host processing results and scheduling: hidden while another step is in flight, else the device waits for it. "
        f"Drawn are {WINDOW_STEPS} typical steps of each file.",
        lambda: _draw_timeline(windows),
    )


def _window(path: str | Path) -> Sequence[StepSpan]:
    window = typical_window(read_timeline(path), WINDOW_STEPS)
    try:
        hidden_share(window)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return window


def _draw_timeline(windows: dict[str, Sequence[StepSpan]]) -> Figure:
    figure = canvas.new_figure(canvas.WIDTH, 0.9 + 1.7 * len(windows))
    panels = figure.subplots(len(windows), squeeze=False, sharex=True)[:, 0]
    for axes, (path, window) in zip(panels, windows.items(), strict=True):
        start = window[0].launched
        for span in window:
            _bar(axes, span, start)
        work = [(1e3 * (a - start), 1e3 * (b - a)) for a, b in host_work(window)]
        axes.broken_barh(work, (-0.35, 0.7), color=canvas.ORANGE)
        axes.set_yticks([2, 1, 0], ["even steps", "odd steps", "host"])
        axes.set(title=f"{Path(path).stem}: {hidden_share(window):.0%} of the host's work is hidden", ylim=(-0.6, 2.6))
        axes.grid(True, axis="x")
        axes.tick_params(axis="y", length=0)
    panels[-1].set(xlabel="milliseconds", xlim=(0, None))
    _timeline_legend(panels[0])
    return figure


def _bar(axes: Any, span: StepSpan, start: float) -> None:
    row = 2 - span.step % 2
    left, width = 1e3 * (span.launched - start), 1e3 * (span.finalized - span.launched)
    axes.broken_barh([(left, width)], (row - 0.35, 0.7), color=canvas.BLUE, edgecolor="white")
    axes.text(left + width / 2, row, str(span.step), color="white", ha="center", va="center", size=8, clip_on=True)


def _timeline_legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    parts = ((canvas.BLUE, "step in flight"), (canvas.ORANGE, "host processes results and schedules"))
    canvas.legend_above(axes, handles=[Patch(color=colour, label=label) for colour, label in parts])
