"""Pictures of recorded routes: load, its entropy, reuse between neighbours, drift. See canvas.py for the look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollout import canvas
from rollout.canvas import LAYER, Picture
from rollout.look import site_labels
from storage.survey import Survey
from storage.trace import Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_RATIO = 8.0
MAX_VERSIONS = 12


def survey_pictures(survey: Survey) -> list[Picture]:
    """All that one dataset gives; reuse and versions only where there are neighbours and versions."""
    pictures = [load_map(survey), entropy_over_steps(survey)]
    if survey.neighbours:
        pictures.append(reuse_between_neighbours(survey))
    if len(survey.versions) > 1:
        pictures.append(load_moved_by_versions(survey))
    return pictures


def load_map(survey: Survey) -> Picture:
    """Heat map, site x expert, of the load against the balanced one."""
    ratio = load_ratio(survey)
    return Picture(
        "expert_load",
        "Expert load",
        f"How often each expert was chosen in {survey.rows:,} recorded rows, as a multiple of the balanced load: "
        "white is balanced, red is chosen more often, blue less often, black never.",
        lambda: _draw_load_map(ratio, survey.spec.sites),
    )


def load_ratio(survey: Survey) -> np.ndarray:
    """float64 `[sites, experts]`: load divided by the balanced load; nan where a site has no such expert."""
    ratio = np.full((survey.spec.num_sites, max(site.num_experts for site in survey.spec.sites)), np.nan)
    for row, site, counts in zip(ratio, survey.spec.sites, survey.load(), strict=True):
        row[: site.num_experts] = counts / (survey.rows * site.top_k / site.num_experts)
    return ratio


def _draw_load_map(ratio: np.ndarray, sites: Sequence[Site]) -> Figure:
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    chosen = ratio[ratio > 0]
    limit = float(np.clip(2 ** np.ceil(np.log2(max(chosen.max(), 1 / chosen.min()))), 2, MAX_RATIO))
    shown = np.where(ratio == 0, 0.5 / limit, np.clip(ratio, 1 / limit, limit))
    scale = {"cmap": canvas.diverging(), "norm": LogNorm(1 / limit, limit)}
    figure, axes, image = canvas.heat_map(shown, sites, **scale)
    ticks = 2.0 ** np.arange(-np.log2(limit), np.log2(limit) + 1)
    bar = figure.colorbar(image, ax=axes, ticks=ticks, label="times the balanced load", pad=0.01, aspect=30)
    bar.ax.set_yticklabels([_times(tick, limit) for tick in ticks])
    bar.ax.minorticks_off()
    if (ratio == 0).any():
        never = Patch(color="black", label=f"never chosen ({(ratio == 0).sum():,} of {(ratio >= 0).sum():,})")
        figure.legend(handles=[never], loc="outside upper right")
    return figure


def _times(tick: float, limit: float) -> str:
    sign = {1 / limit: "\N{LESS-THAN OR EQUAL TO} ", limit: "\N{GREATER-THAN OR EQUAL TO} "}.get(tick, "")
    return sign + (f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}")


def entropy_over_steps(survey: Survey) -> Picture:
    """Lines of each site's entropy over the steps; over the sites when there is one step."""
    one = len(survey.steps) == 1
    return Picture(
        "load_entropy",
        "Load entropy per layer" if one else "Load entropy over steps",
        "How evenly the experts of a layer share the work: 100 % is all equally often, 0 % one expert only. A line "
        "that falls over the steps is a router that collapses onto few experts."
        + (" This dataset has one step." if one else ""),
        lambda: _draw_entropy_of_sites(survey) if one else _draw_entropy_over_steps(survey),
    )


def _draw_entropy_of_sites(survey: Survey) -> Figure:
    figure, axes = canvas.new_axes(LAYER, "entropy, share of the balanced")
    axes.plot(survey.entropy()[0], "o-", color=canvas.BLUE, label=f"step {survey.steps[0]}")
    canvas.label_sites(axes.xaxis, survey.spec.sites, 24)
    canvas.percent(axes.yaxis)
    canvas.legend_above(axes)
    return figure


def _draw_entropy_over_steps(survey: Survey) -> Figure:
    figure, axes = canvas.new_axes("step", "entropy, share of the balanced")
    entropy = survey.entropy()
    for site, colour in zip(entropy.T, canvas.colours_of(survey.spec.num_sites), strict=True):
        axes.plot(survey.steps, site, color=colour, linewidth=1, alpha=0.8)
    axes.plot(survey.steps, entropy.mean(1), color="black", linewidth=2.2, label="mean of all layers")
    canvas.whole_numbers(axes.xaxis)
    canvas.percent(axes.yaxis)
    canvas.legend_above(axes)
    canvas.colour_scale(figure, axes, site_labels(survey.spec.sites), LAYER)
    return figure


def reuse_between_neighbours(survey: Survey) -> Picture:
    """Per site the share of experts that the token before chose too, beside what chance gives."""
    return Picture(
        "reuse",
        "Reuse between neighbouring tokens",
        "Share of a token's experts that the token before it in the same sequence chose too. The marks are what two "
        "unrelated tokens share under the same load; the distance is what caching or prefetching experts can use. "
        f"{survey.neighbours:,} pairs of tokens.",
        lambda: _draw_reuse(survey),
    )


def _draw_reuse(survey: Survey) -> Figure:
    figure, axes = canvas.new_axes(LAYER, "experts reused")
    sites = np.arange(survey.spec.num_sites)
    axes.bar(sites, survey.reuse(), color=canvas.BLUE, width=0.75, label="the token before")
    axes.hlines(
        survey.chance(), sites - 0.45, sites + 0.45, color=canvas.ORANGE, linewidth=3, label="an unrelated token"
    )
    axes.set_xlim(-0.7, survey.spec.num_sites - 0.3)
    canvas.label_sites(axes.xaxis, survey.spec.sites, 24)
    canvas.percent(axes.yaxis)
    canvas.legend_above(axes, reverse=True)
    return figure


def load_moved_by_versions(survey: Survey) -> Picture:
    """Per site the share of load that moved since the first weight version, beside what other prompts alone explain."""
    first, *later = survey.versions
    shown = [later[i] for i in np.unique(np.linspace(0, len(later) - 1, MAX_VERSIONS).round().astype(int))]
    chance = np.mean([survey.moved_by_chance(first, version) for version in shown], axis=0)
    noise = "each version has too few prompts to say how much."
    if not np.isnan(chance).any():
        noise = "about the dashed line, estimated from two halves of each version's prompts."
    some = f" {len(shown)} of {len(later)} later versions are drawn." if len(shown) < len(later) else ""
    return Picture(
        "weight_versions",
        "Load moved between weight versions",
        f"Share of expert assignments that are with another expert than under weight version {first}, per layer. Other "
        f"prompts alone would move some load: {noise}{some}",
        lambda: _draw_versions(survey, shown, first, chance),
    )


def _draw_versions(survey: Survey, shown: list[int], first: int, chance: np.ndarray) -> Figure:
    figure, axes = canvas.new_axes(LAYER, f"load moved since version {first}")
    for version, colour in zip(shown, canvas.colours_of(len(shown)), strict=True):
        moved = survey.moved_between(first, version)
        axes.plot(moved, "o-", color=colour, markersize=3, linewidth=1.2, label=f"version {version}")
    several = len(shown) > 3
    if several:
        canvas.colour_scale(figure, axes, [str(version) for version in shown], "weight version")
    if not np.isnan(chance).any():
        axes.plot(chance, "--", color=canvas.GREY, linewidth=2.5, label="from other prompts alone")
    axes.set_ylim(bottom=0)
    canvas.label_sites(axes.xaxis, survey.spec.sites, 24)
    canvas.percent(axes.yaxis)
    handles, labels = axes.get_legend_handles_labels()
    skipped = len(shown) if several else 0
    if handles[skipped:]:
        canvas.legend_above(axes, handles=handles[skipped:], labels=labels[skipped:])
    return figure
