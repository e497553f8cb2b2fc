"""What a trainer actor takes out of Ray's object store: the tables of its own data-parallel rank and no others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from actors.remote import fetch
from storage.schema import from_table
from storage.shard import bounds, check_rank
from storage.trace import Trace


def fetch_rank(refs: Sequence[Any], *, dp_rank: int, dp_size: int, sizes: Sequence[int] | None = None) -> list[Trace]:
    """See `actors.fetch`."""
    own = rank_indices(len(refs), dp_rank, dp_size, sizes)
    tables = fetch([refs[index] for index in own])
    for index, table in zip(own, tables, strict=True):
        if not isinstance(table, pa.Table):
            raise TypeError(
                f"refs[{index}] holds a {type(table).__name__}, need a table of traces: "
                "pass what client.stream(as_refs=True) yields"
            )
    return [trace for table in tables for trace in from_table(table)]


def rank_indices(count: int, rank: int, size: int, sizes: Sequence[int] | None = None) -> list[int]:
    """Which of `count` references rank `rank` of `size` takes, in ascending order.

    Without `sizes` consecutive ones, as many as on other ranks or one more. With them the largest first, each to
    the rank that has least so far; of equals the lower index and the lower rank, so that all ranks agree.

    >>> [rank_indices(4, rank, 2) for rank in range(2)]
    [[0, 1], [2, 3]]
    >>> [rank_indices(4, rank, 2, sizes=[9, 1, 5, 3]) for rank in range(2)]
    [[0], [1, 2, 3]]

    Raises:
        ValueError: no such rank, fewer references than ranks, or `sizes` that are not one positive int per reference.
    """
    check_rank(rank, size, "dp")
    if count < size:
        raise ValueError(
            f"{count} references cannot be split over {size} ranks, each takes whole tables; "
            "sample more prompts, or use fewer ranks"
        )
    if sizes is None:
        return list(range(*bounds(count, rank, size, "dp")))
    _check_sizes(sizes, count)
    owners, loads = [0] * count, [0] * size
    for index in sorted(range(count), key=lambda index: (-sizes[index], index)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return [index for index, owner in enumerate(owners) if owner == rank]


def _check_sizes(sizes: Sequence[int], count: int) -> None:
    if len(sizes) != count:
        raise ValueError(f"sizes has {len(sizes)} entries for {count} references, need one per reference")
    for index, given in enumerate(sizes):
        if given < 1:
            raise ValueError(f"sizes[{index}] is {given}; need 1 or more (tokens, bytes or traces of the table)")
