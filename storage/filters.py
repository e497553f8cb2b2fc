"""What can be said of a pyarrow filter without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow.compute as pc

from storage.columns import COLUMNS


def both(one: pc.Expression | None, other: pc.Expression | None) -> pc.Expression | None:
    """Rows that pass both; None lets every row pass."""
    return one & other if one is not None and other is not None else one if one is not None else other


def columns_with(columns: Sequence[str], filter: pc.Expression | None) -> list[str]:
    """`columns` and those that the text of the filter names, in a trace's order; expressions do not list their fields.

    >>> columns_with(["sample_id"], pc.field("reward") > 0.5)
    ['sample_id', 'reward']
    """
    words = set() if filter is None else set(re.findall(r"\w+", str(filter)))
    return [name for name in COLUMNS if name in set(columns) | words]
