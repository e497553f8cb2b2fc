"""Pictures of the drift between two datasets: agreement per layer, and which experts gained and lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout import canvas
from rollout.canvas import LAYER, Picture
from storage.drift import Drift

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drift_pictures(drift: Drift, left: str, right: str) -> list[Picture]:
    """Agreement of `right` with `left`, and the experts that moved if any did."""
    pictures = [agreement(drift, left, right)]
    if np.nanmax(abs(share_moved(drift))) > 0:
        pictures.append(moved_experts(drift, left, right))
    return pictures


def agreement(drift: Drift, left: str, right: str) -> Picture:
    """Per layer the overlap of the chosen sets, and the share of rows with the same set."""
    return Picture(
        "agreement",
        "Agreement of two datasets",
        f"Of {drift.rows:,} rows of {drift.samples:,} samples that both {left} and {right} recorded for the same "
        "tokens: the mean share of a row's experts that both chose, and the share of rows whose whole set is the same.",
        lambda: _draw_agreement(drift),
    )


def _draw_agreement(drift: Drift) -> Figure:
    figure, axes = canvas.new_axes(LAYER, "agreement")
    sites = drift.sites()
    axes.plot([site.overlap for site in sites], "o-", color=canvas.BLUE, markersize=4, label="experts in common")
    axes.plot(
        [site.same_set for site in sites], "s--", color=canvas.ORANGE, markersize=4, label="rows with the same set"
    )
    canvas.label_sites(axes.xaxis, drift.spec.sites, 24)
    canvas.percent(axes.yaxis)
    canvas.legend_above(axes)
    return figure


def share_moved(drift: Drift) -> np.ndarray:
    """float64 `[sites, experts]`: change of an expert's share of its site's assignments, in percentage points.

    nan where a site has no such expert.
    """
    moved = np.full((drift.spec.num_sites, max(site.num_experts for site in drift.spec.sites)), np.nan)
    for row, site, found in zip(moved, drift.spec.sites, drift.sites(), strict=True):
        row[: site.num_experts] = 100 * (found.gained - found.lost) / (drift.rows * site.top_k)
    return moved


def moved_experts(drift: Drift, left: str, right: str) -> Picture:
    """Heat map, site x expert, of the change of an expert's share."""
    return Picture(
        "moved_experts",
        "Experts that gained or lost",
        f"Change of each expert's share of its layer's assignments from {left} to {right}, on the same rows: red "
        "gained, blue lost.",
        lambda: _draw_moved(drift),
    )


def _draw_moved(drift: Drift) -> Figure:
    moved = share_moved(drift)
    limit = float(np.nanmax(abs(moved)))
    scale = {"cmap": canvas.diverging(), "vmin": -limit, "vmax": limit}
    figure, axes, image = canvas.heat_map(moved, drift.spec.sites, **scale)
    bar = figure.colorbar(image, ax=axes, label="percentage points", pad=0.01, aspect=30)
    bar.outline.set_visible(False)
    return figure
