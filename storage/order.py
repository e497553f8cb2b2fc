"""In which order one reader of several visits the samples of a dataset: a function of a few integers, nothing else.

Blocks of up to 16 consecutive samples of a step (about a row group) are permuted per epoch and dealt out to the readers
in turn, so that every sample has exactly one reader; each reader then mixes its samples in a buffer. Nothing depends on
what was read before, so a position in the order is all the state there is; nor on which files hold the samples, so the
order outlives a compaction. In memory are a few numbers per step and per block, never one per sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

BLOCK = 16
ORDER = 2
"""Number of this order, for states that are kept: one more whenever the same integers lead to another order."""


class ReaderOrder:
    """The samples of one reader, in the order it reads them; `seed=None` keeps the order of the dataset.

    >>> order = ReaderOrder([20, 3], reader=1, readers=2, seed=None, epoch=0)  # the second block of three
    >>> len(order), list(order.places(range(4)))
    (4, [(0, 16), (0, 17), (0, 18), (0, 19)])
    """

    def __init__(self, counts: Sequence[int], *, reader: int, readers: int, seed: int | None, epoch: int) -> None:
        samples = np.asarray(counts, np.int64)
        ends = np.cumsum(-(-samples // BLOCK))  # of each step, in blocks
        total = int(ends[-1]) if len(ends) else 0
        every = np.arange(total) if seed is None else np.random.default_rng([seed, epoch]).permutation(total)
        mine = every[reader::readers]
        self._step = np.searchsorted(ends, mine, side="right")
        block = mine - np.concatenate([[0], ends])[self._step]
        self._start = block * BLOCK
        self._ends = np.cumsum(np.minimum(BLOCK, samples[self._step] - self._start))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def places(self, positions: Iterable[int]) -> Iterator[tuple[int, int]]:
        """For each position in the order the step, as an index into `counts`, and the number of the sample in it."""
        for position in positions:
            block = int(np.searchsorted(self._ends, position, side="right"))
            before = int(self._ends[block - 1]) if block else 0
            yield int(self._step[block]), int(self._start[block]) + position - before


class Mixed(Iterator[int]):
    """Positions `0 .. length - 1`, each once, drawn at random among the next `buffer` that are left.

    Position p leaves not before the `p - buffer + 1`-th draw, so whoever follows keeps at most `buffer` samples.
    """

    def __init__(self, length: int, buffer: int, rng: np.random.Generator) -> None:
        self._length, self._rng = length, rng
        self._held = list(range(min(buffer, length)))
        self._following = len(self._held)
        self._last = False

    def __next__(self) -> int:
        if self._following < self._length:
            slot = int(self._rng.integers(len(self._held)))
            drawn, self._held[slot] = self._held[slot], self._following
            self._following += 1
            return drawn
        if not self._last:
            self._last = True
            self._held = [self._held[slot] for slot in self._rng.permutation(len(self._held))[::-1]]
        if not self._held:
            raise StopIteration
        return self._held.pop()

    def left(self) -> Iterator[int]:
        """The positions that were not drawn until now, ascending."""
        return chain(sorted(self._held), range(self._following, self._length))
