"""`moe-rollout compare`: routing drift as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from storage import TraceDataset
from storage.drift import Drift, SiteDrift, compare_datasets, load_by_version, load_moved
from storage.trace import RoutingSpec, Site


def compare(options: argparse.Namespace) -> int:
    """Print how far B, or weight version W, sends tokens to other experts than A, or version V."""
    if (options.other is None) == (options.versions is None):
        raise ValueError("compare needs a second dataset or --versions V W, one of the two")
    dataset = TraceDataset(options.dir)
    if options.versions is not None:
        found = compare_versions(dataset, *options.versions)
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


def compare_versions(dataset: TraceDataset, old: int, new: int) -> dict[str, Any]:
    """The loads of two weight versions as JSON values; `share` is the change of an expert's share of assignments.

    Raises:
        ValueError: a version has no recorded rows.
    """
    loads = load_by_version(dataset, dataset.spec)
    if absent := [version for version in (old, new) if version not in loads]:
        raise ValueError(f"weight version {absent[0]} has no recorded rows in {dataset.root}; recorded: {list(loads)}")
    sites = [_load_json(site, loads[old][i], loads[new][i]) for i, site in enumerate(dataset.spec.sites)]
    rows = {name: _rows(loads[version], dataset.spec) for name, version in (("rows", old), ("other_rows", new))}
    return {"left": f"{dataset.root} version {old}", "right": f"{dataset.root} version {new}", **rows, "sites": sites}


def _load_json(site: Site, before: np.ndarray, after: np.ndarray) -> dict[str, Any]:
    change = after / after.sum() - before / before.sum()
    return {**_name(site), "load_moved": load_moved(before, after), **_movers(change, change, None)}


def _rows(load: list[np.ndarray], spec: RoutingSpec) -> int:
    return int(load[0].sum()) // spec.sites[0].top_k


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
    table = Table(title=f"from {found['left']} to {found['right']}", caption=_caption(found, by_row))
    for title in ("layer", *(["overlap", "same set"] if by_row else []), "moved"):
        table.add_column(title, justify="right")
    table.add_column("gained")
    table.add_column("lost")
    for label, site in zip(
        site_labels([Site(s["site"], s["layer"], 1, 1) for s in found["sites"]]), found["sites"], strict=True
    ):
        figures = [site[name] for name in ("overlap", "same_set", "load_moved") if name in site]
        movers = [", ".join(_mover(expert) for expert in site[kind][:top]) or "-" for kind in ("gained", "lost")]
        table.add_row(label, *(f"{figure:.2%}" for figure in figures), *movers)
    return table


def site_labels(sites: Sequence[Site]) -> list[str]:
    """A short name per site: its decoder layer, with the module's name where two sites share the layer.

    >>> site_labels([Site("h.0.attention.router", 0, 4, 2), Site("h.0.mlp.router", 0, 4, 2), Site("h.1.gate", 1, 4, 2)])
    ['0 attention.router', '0 mlp.router', '1']
    """
    layers = Counter(site.layer for site in sites)
    return [
        str(site.layer) if layers[site.layer] == 1 else f"{site.layer} {site.name.partition(f'.{site.layer}.')[2]}"
        for site in sites
    ]


def _mover(facts: dict[str, Any]) -> str:
    return f"{facts['expert']}\u00a0{100 * facts['share']:+.2f}"  # a line breaks between experts only


def _caption(found: dict[str, Any], by_row: bool) -> str:
    experts = (
        "moved: share of assignments that are with another expert\n"
        "gained, lost: expert id, change of its share of assignments in points"
    )
    if not by_row:
        return f"{found['rows']} and {found['other_rows']} rows\n{experts}"
    return (
        f"{found['rows']} rows of {found['samples']} samples; {found['other_tokens']} with other tokens, compared up "
        f"to there;\n{found['unrecorded']} without routes; on one side only: {found['only_left']} and "
        f"{found['only_right']}\n{experts}"
    )
