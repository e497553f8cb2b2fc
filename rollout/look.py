"""`moe-rollout compare`: routing drift as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from rollout.plain import plain
from storage import TraceDataset
from storage.drift import Drift, SiteDrift, compare_datasets
from storage.survey import Survey, survey_dataset
from storage.trace import Site

TITLES = {"overlap": "overlap", "same_set": "same set", "load_moved": "moved", "moved_by_chance": "by chance"}


def compare(options: argparse.Namespace) -> int:
    """Print how far B, or weight version W, sends tokens to other experts than A, or version V."""
    if (options.other is None) == (options.versions is None):
        raise ValueError("compare needs a second dataset or --versions V W, one of the two")
    dataset = TraceDataset(options.dir)
    if options.versions is not None:
        found = compare_versions(survey_dataset(dataset), options.dir, *options.versions)
    else:
        found = drift_json(compare_datasets(dataset, TraceDataset(options.other)), options.dir, options.other)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        Console().print(compare_table(found, options.top))
    return 0


def drift_json(drift: Drift, left: str, right: str) -> dict[str, Any]:
    """All figures of a drift as JSON values. An expert's `moved` is in rows that chose it on one side only.

    >>> drift_json(drift, "before/", "after/")["sites"][0]["gained"][0]
    {'expert': 17, 'moved': 240, 'share': 0.0113}
    """
    counts = {
        name: getattr(drift, name)
        for name in ("samples", "rows", "other_tokens", "unrecorded", "only_left", "only_right")
    }
    sites = [_site_json(*pair, drift.rows) for pair in zip(drift.spec.sites, drift.sites(), strict=True)]
    return {"left": str(left), "right": str(right), **counts, "sites": sites}


def _site_json(site: Site, found: SiteDrift, rows: int) -> dict[str, Any]:
    net = found.gained - found.lost
    figures = {name: getattr(found, name) for name in ("overlap", "same_set", "load_moved")}
    return {**_name(site), **figures, **_movers(net, net / (rows * site.top_k), "moved")}


def compare_versions(survey: Survey, dataset: str, old: int, new: int) -> dict[str, Any]:
    """The loads of two weight versions as JSON values; `share` is the change of an expert's share of assignments.

    `moved_by_chance` is about the `load_moved` that other prompts alone explain, None when there are too few to tell.

    Raises:
        ValueError: a version has no recorded rows.
    """
    if absent := [version for version in (old, new) if version not in survey.versions]:
        raise ValueError(f"weight version {absent[0]} has no recorded rows in {dataset}; recorded: {survey.versions}")
    before, after = survey.load_of(old), survey.load_of(new)
    figures = zip(survey.moved_between(old, new), survey.moved_by_chance(old, new), strict=True)
    sites = [
        {
            **_name(site),
            "load_moved": float(moved),
            "moved_by_chance": None if np.isnan(chance) else float(chance),
            **_load_movers(before[index], after[index]),
        }
        for index, (site, (moved, chance)) in enumerate(zip(survey.spec.sites, figures, strict=True))
    ]
    rows = {
        name: int(load[0].sum()) // survey.spec.sites[0].top_k
        for name, load in (("rows", before), ("other_rows", after))
    }
    return {"left": f"{dataset} version {old}", "right": f"{dataset} version {new}", **rows, "sites": sites}


def _load_movers(before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    change = after / after.sum() - before / before.sum()
    return _movers(change, change, None)


def _name(site: Site) -> dict[str, Any]:
    return {"site": site.name, "layer": site.layer}


def _movers(net: np.ndarray, share: np.ndarray, count: str | None) -> dict[str, Any]:
    """Experts that gained and lost on balance, those that moved most first."""

    def facts(expert: int) -> dict[str, Any]:
        counted = {} if count is None else {count: int(net[expert])}
        return {"expert": expert, **counted, "share": float(share[expert])}

    order = [int(expert) for expert in np.argsort(-abs(net), kind="stable")]
    return {
        "gained": [facts(expert) for expert in order if net[expert] > 0],
        "lost": [facts(expert) for expert in order if net[expert] < 0],
    }


def compare_table(found: dict[str, Any], top: int) -> Table:
    """One row per site, the `top` experts that gained and lost most, in percentage points of the assignments."""
    by_row = "overlap" in found["sites"][0]
    heading = plain(f"from {found['left']} to {found['right']}", "table.title")
    table = Table(title=heading, caption=_caption(found, by_row))
    names = ("overlap", "same_set", "load_moved") if by_row else ("load_moved", "moved_by_chance")
    for title in ("layer", *(TITLES[name] for name in names)):
        table.add_column(title, justify="right")
    table.add_column("gained")
    table.add_column("lost")
    labels = site_labels([Site(site["site"], site["layer"], 1, 1) for site in found["sites"]])
    for label, site in zip(labels, found["sites"], strict=True):
        figures = ["-" if site[name] is None else f"{site[name]:.2%}" for name in names]
        movers = [", ".join(_mover(expert) for expert in site[kind][:top]) or "-" for kind in ("gained", "lost")]
        table.add_row(plain(label), *figures, *movers)
    return table


def site_labels(sites: Sequence[Site]) -> list[str]:
    """A short name per site: its decoder layer, with the part of the module's name that tells it from its layer mates.

    >>> site_labels([Site("h.0.attention.router", 0, 4, 2), Site("h.0.mlp.router", 0, 4, 2), Site("h.1.gate", 1, 4, 2)])
    ['0 attention', '0 mlp', '1']
    """
    layers: dict[int, list[str]] = {}
    for site in sites:
        layers.setdefault(site.layer, []).append(site.name)
    return [_label(site, layers[site.layer]) for site in sites]


def _label(site: Site, mates: list[str]) -> str:
    if len(mates) == 1:
        return str(site.layer)
    columns = zip(*(name.split(".") for name in mates), strict=False)
    telling = next((column for column in columns if len(set(column)) == len(mates)), mates)
    return f"{site.layer} {telling[mates.index(site.name)]}"


def _mover(facts: dict[str, Any]) -> str:
    return f"{facts['expert']}\u00a0{100 * facts['share']:+.2f}"  # a line breaks between experts only


def _caption(found: dict[str, Any], by_row: bool) -> str:
    experts = (
        "moved: share of assignments that are with another expert\n"
        "gained, lost: expert id, change of its share of assignments in points"
    )
    if not by_row:
        return f"{found['rows']} and {found['other_rows']} rows\nby chance: from other prompts alone\n{experts}"
    return (
        f"{found['rows']} rows of {found['samples']} samples; {found['other_tokens']} with other tokens, compared up "
        f"to there;\n{found['unrecorded']} without routes; on one side only: {found['only_left']} and "
        f"{found['only_right']}\n{experts}"
    )
