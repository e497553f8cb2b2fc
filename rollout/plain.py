"""Names that others chose, in tables: exactly as they are, and nothing in them that a terminal would obey."""

from __future__ import annotations

from rich.text import Text


def plain(name: str, style: str = "") -> Text:
    r"""`name` without markup: `[red]` stays as it is; what cannot be printed is shown by its escape.

    >>> plain("run/0/[red]\x1b[2J/0").plain
    'run/0/[red]\\x1b[2J/0'
    """
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name), style)
