"""One HTML page with figures, pictures and tables. It holds everything itself and may load nothing from anywhere."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rollout.canvas import DPI, Picture, png
from rollout.plain import plain

CSS_DPI = 96

STYLE = """
:root { --ink: #1d2129; --soft: #5c6370; --line: #e3e6ea; --blue: #2166ac; }
* { box-sizing: border-box; }
body { margin: 0; background: #f4f5f7; color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; margin: 0; }
h2 { font-size: 18px; margin: 0 0 4px; }
h2::first-letter { text-transform: uppercase; }
.where { color: var(--soft); margin: 2px 0 20px; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 20px 0; font-size: 14px; }
a { color: var(--blue); text-decoration: none; }
a:hover { text-decoration: underline; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 12px; }
.card, section { background: white; border: 1px solid var(--line); border-radius: 8px; }
.card { padding: 12px 14px; }
.card b { display: block; font-size: 21px; line-height: 1.35; }
.card span { color: var(--soft); font-size: 13px; }
section { padding: 20px 24px; margin-top: 18px; scroll-margin-top: 12px; }
section p { color: var(--soft); margin: 0 0 14px; max-width: 100ch; }
img { display: block; max-width: 100%; height: auto; }
.scroll { overflow: auto; max-height: 560px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { position: sticky; top: 0; background: white; text-align: left; color: var(--soft); font-weight: 600; }
th, td { padding: 5px 22px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.right { text-align: right; }
footer { color: var(--soft); font-size: 13px; margin-top: 24px; }
@media print { body { background: white; } .scroll { max-height: none; } section { break-inside: avoid; } }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def write_report(
    path: str | Path, figures: dict[str, Any], pictures: Sequence[Picture], tables: Sequence[Table]
) -> None:
    """Write the page: `figures` as `storage.summary.summarise` returns them at its head, then pictures, then tables.

    >>> write_report("report.html", summarise(dataset), survey_pictures(survey), list(dataset_tables(figures)))
    """
    Path(path).write_text("".join(_page(figures, pictures, tables)), encoding="utf-8")


def _page(figures: dict[str, Any], pictures: Sequence[Picture], tables: Sequence[Table]) -> Iterator[str]:
    where = escape(plain(str(figures["dataset"])).plain)
    yield f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Routing report: {where}</title>\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>Routing report</h1>\n"
    yield f'<p class="where">{where}</p>\n<div class="cards">\n'
    yield from (_card(name, value) for name, value in key_figures(figures))
    names = [*((picture.name, picture.title) for picture in pictures), ("tables", "Tables")]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>\n' for name, title in names)
    yield f"</div>\n<nav>\n{links}</nav>\n"
    yield from (_picture(picture) for picture in pictures)
    yield from (_table(table, 'id="tables"' if table is tables[0] else "") for table in tables)
    yield "<footer>Written by moe-rollout report. Everything is in this file.</footer>\n</main>\n</body>\n</html>\n"


def key_figures(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of what a reader wants to know first.

    >>> list(key_figures(summarise(dataset)))[:2]
    [('steps', '4'), ('samples', '320')]
    """
    rewards, rows, sites = figures["rewards"], figures["rows"], figures["sites"]
    yield "steps", f"{figures['steps']['count']:,}"
    yield "samples", f"{figures['samples']:,}"
    yield "tokens", f"{figures['tokens']['all']:,}"
    finite = rewards is not None and rewards["count"]
    yield "mean reward", f"{rewards['mean']:.3f}" if finite else "none" if rewards is None else "not finite"
    yield "rows recorded", f"{rows['recorded']:,}"
    yield "rows missing", f"{rows['missing']:,}"
    yield "MoE layers", f"{len(sites)}"
    shapes = sorted({(site["num_experts"], site["top_k"]) for site in sites})
    yield "experts chosen", ", ".join(f"{top_k} of {experts}" for experts, top_k in shapes)


def _card(name: str, value: str) -> str:
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>\n'


def _picture(picture: Picture) -> str:
    data = png(picture, titled=False)
    width, height = (round(pixels * CSS_DPI / DPI) for pixels in struct.unpack(">II", data[16:24]))  # the IHDR chunk
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return (
        f'<section id="{picture.name}">\n<h2>{escape(picture.title)}</h2>\n<p>{escape(picture.caption)}</p>\n'
        f'<img src="{source}" width="{width}" height="{height}" alt="{escape(picture.title)}">\n</section>\n'
    )


def _table(table: Table, attributes: str) -> str:
    sides = [' class="right"' if column.justify == "right" else "" for column in table.columns]
    heads = "".join(f"<th{side}>{_text(c.header)}</th>" for side, c in zip(sides, table.columns, strict=True))
    rows = zip(*(column.cells for column in table.columns), strict=True)
    cells = ("".join(f"<td{side}>{_text(cell)}</td>" for side, cell in zip(sides, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>\n" for row in cells)
    caption = f"<p>{_text(table.caption)}</p>\n" if table.caption else ""
    return (
        f"<section {attributes}>\n<h2>{_text(table.title)}</h2>\n{caption}"
        f'<div class="scroll">\n<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n</div>\n'
        "</section>\n"
    )


def _text(cell: Any) -> str:
    """HTML of what a rich table holds: markup is dropped, lines stay."""
    plain = cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
    return escape(plain).replace("\n", "<br>")
