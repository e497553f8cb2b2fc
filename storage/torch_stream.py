"""TraceStream: the traces of a dataset as a torch IterableDataset. Needs torch; `TraceDataset.torch` imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from storage.order import ORDER, Mixed, ReaderOrder
from storage.scan import Sources, dropped, read_rows, rows_at
from storage.trace import Trace


class TraceStream(IterableDataset[Trace]):
    """Every trace of some steps once per epoch, over all ranks and DataLoader workers together.

    >>> stream = ds.torch(rank=0, world_size=8, shuffle_buffer=256, seed=0)
    >>> loader = DataLoader(stream, batch_size=32, num_workers=4, collate_fn=ReplayBatch.collate)
    >>> state = stream.state_dict()          # after any trace, in the process that iterates
    >>> stream.load_state_dict(state)        # a stream made with the same arguments goes on with the next trace

    torchdata's StatefulDataLoader calls both methods in each worker. Readers get blocks of 16 samples, so one may
    have up to 16 samples more than another.
    """

    def __init__(
        self, sources: Sources, steps: list[int], *, rank: int, world_size: int, shuffle_buffer: int, seed: int
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in [0, {world_size})")
        if shuffle_buffer < 0:
            raise ValueError(f"shuffle_buffer is {shuffle_buffer}, need 0 (the order of the dataset) or more")
        self._sources, self._steps = sources, steps
        self._rank, self._world_size, self._buffer, self._seed = rank, world_size, shuffle_buffer, seed
        self._epoch = self._yielded = 0
        self._counts: list[int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` at its first sample; each is shuffled differently. The end of one is the start of the next."""
        self._epoch, self._yielded = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Where this reader is. Plain integers, e.g. `{"epoch": 0, "yielded": 96, "reader": 0, "readers": 8, ...}`."""
        reader, readers = self._reader()
        return {"epoch": self._epoch, "yielded": self._yielded} | self._arguments(reader, readers)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the last trace of `state`; ValueError when this stream is another one, or visits the samples in
        another order than the release that saved the state."""
        if (order := state.get("order")) != ORDER:
            raise ValueError(
                f"this state was saved by a release whose streams have another order ({order}, here {ORDER}), so what "
                f"it has yielded cannot be told; set_epoch({state.get('epoch', 0)}) starts that epoch again"
            )
        expected = self._arguments(*self._reader())
        if different := {k: (state.get(k), v) for k, v in expected.items() if state.get(k) != v}:
            raise ValueError(f"this state is of another stream; (in the state, here): {different}")
        self._epoch, self._yielded = state["epoch"], state["yielded"]

    def __iter__(self) -> Iterator[Trace]:
        reader, readers = self._reader()
        seed = self._seed if self._buffer else None
        order = ReaderOrder(self._count(), reader=reader, readers=readers, seed=seed, epoch=self._epoch)
        draws, left = self._draws(len(order), reader)
        reading = self._read(order, left)
        held: dict[int, Trace] = {}
        for position in draws:
            while position not in held:
                number, trace = next(reading)
                held[number] = trace
            self._yielded += 1
            yield held.pop(position)
        self._epoch, self._yielded = self._epoch + 1, 0

    def _draws(self, length: int, reader: int) -> tuple[Iterator[int], Callable[[], Iterator[int]]]:
        """The positions that are still to be yielded, in turn, and, as often as asked, in ascending order."""
        if not self._buffer:
            return iter(range(self._yielded, length)), partial(iter, range(self._yielded, length))
        mixed = Mixed(length, self._buffer, np.random.default_rng([self._seed, self._epoch, reader]))
        for _ in range(self._yielded):
            next(mixed)
        left = list(islice(mixed.left(), self._buffer))
        begin = left[-1] + 1 if left else length
        return mixed, lambda: chain(left, range(begin, length))

    def _read(self, order: ReaderOrder, left: Callable[[], Iterator[int]]) -> Iterator[tuple[int, Trace]]:
        numbers = ((self._steps[step], number) for step, number in order.places(left()))
        return zip(left(), read_rows(self._sources, rows_at(self._sources, numbers)), strict=True)

    def _count(self) -> list[int]:
        """Samples of each step; ValueError when one was dropped. They never change, so they are counted once."""
        if self._counts is None:
            catalog = self._sources.catalog
            try:
                self._counts = catalog.retry(lambda: catalog.counts(self._steps))
            except KeyError as error:
                raise dropped(self._sources, error) from error
        return self._counts

    def _reader(self) -> tuple[int, int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self._rank * workers + worker, self._world_size * workers

    def _arguments(self, reader: int, readers: int) -> dict[str, Any]:
        samples = sum(self._count())
        return {
            "order": ORDER, "reader": reader, "readers": readers,
            "seed": self._seed, "shuffle_buffer": self._buffer, "samples": samples,
        }  # fmt: skip
