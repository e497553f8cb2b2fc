"""In which order one reader of several visits the samples of a dataset: a function of a few integers, nothing else.

Blocks of up to 16 consecutive samples (about a row group) are permuted per epoch and dealt out to the readers in turn,
so that every sample has exactly one reader; each reader then mixes its samples in a buffer. Nothing depends on what was
read before, so a position in the order is all the state there is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

BLOCK = 16


def blocks(counts: Sequence[int]) -> list[range]:
    """Consecutive samples, at most 16 at a time and never across files.

    >>> blocks([20, 3])
    [range(0, 16), range(16, 20), range(20, 23)]
    """
    ends = np.cumsum([0, *counts]).tolist()
    return [range(at, min(at + BLOCK, end)) for start, end in pairwise(ends) for at in range(start, end, BLOCK)]


def reader_order(counts: Sequence[int], *, reader: int, readers: int, seed: int | None, epoch: int) -> list[int]:
    """The samples of one reader, in the order it reads them; `seed=None` keeps the order of the dataset."""
    all_blocks = blocks(counts)
    chosen = range(len(all_blocks))
    if seed is not None:
        chosen = np.random.default_rng([seed, epoch]).permutation(len(all_blocks)).tolist()
    return [sample for block in list(chosen)[reader::readers] for sample in all_blocks[block]]


def mixed(length: int, buffer: int, rng: np.random.Generator) -> Iterator[int]:
    """Positions `0 .. length - 1`, each once, drawn at random among the next `buffer` that are left.

    Position p leaves not before the `p - buffer + 1`-th draw, so whoever follows keeps at most `buffer` samples.
    """
    held = list(range(min(buffer, length)))
    for following in range(len(held), length):
        slot = int(rng.integers(len(held)))
        yield held[slot]
        held[slot] = following
    yield from (held[slot] for slot in rng.permutation(len(held)))
