"""What can be said of a pyarrow filter without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
from pyarrow.fs import LocalFileSystem

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


def may_match(
    filter: pc.Expression, name: str, ranges: Sequence[tuple[Any, Any] | None], schema: pa.Schema
) -> list[bool]:
    """Whether a row may pass whose column `name` is null or within a range, for each range; None is one unknown.

    >>> may_match(pc.field("reward") > 5, "reward", [(0.0, 3.0), (4.0, 9.0), None], schema)
    [False, True, True]
    """
    column = pc.field(name)
    bounds = [pc.scalar(True) if ends is None else (column >= ends[0]) & (column <= ends[1]) for ends in ranges]
    for_null, *for_ranges = _satisfiable(filter, [column.is_null(), *bounds], schema)
    return [for_null or found for found in for_ranges]


def _satisfiable(filter: pc.Expression, guarantees: Sequence[pc.Expression], schema: pa.Schema) -> list[bool]:
    """Whether a row may pass that is known to pass each guarantee: what pyarrow says of files that hold such rows. Only
    their names are made up, and nothing is read."""
    files, here = pads.ParquetFileFormat(), LocalFileSystem()
    fragments = [
        files.make_fragment(str(number), here, partition_expression=known) for number, known in enumerate(guarantees)
    ]
    left = pads.FileSystemDataset(fragments, schema, files, here).get_fragments(filter=filter)
    numbers = {int(fragment.path) for fragment in left}
    return [number in numbers for number in range(len(guarantees))]
