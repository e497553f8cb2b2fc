"""Which keys each token of a step reads: planned on the host, once per step, for all layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from rollout.device import Stream
from rollout.experts import ROW_MULTIPLE
from rollout.kv_pool import KVPool
from rollout.native import NativeKernels
from rollout.reach import Reach, causal_mask, decode_mask

# Decodes share one kernel call while at most this share of the keys it reads is masked.
MAX_MASKED = 0.4


class Span(NamedTuple):
    """Tokens `[start, end)` of the flattened batch belong to one request.

    It owns the slots `[slot, slot + capacity)`; its keys are in the first `kv_len` of them.
    """

    start: int
    end: int
    slot: int
    kv_len: int
    capacity: int

    @property
    def position(self) -> int:
        """Position of the first token."""
        return self.kv_len - (self.end - self.start)


class Group(NamedTuple):
    """Tokens `[start, end)`, equally many per request, whose keys start at `slot`, `slot + stride`, ...: one strided
    view."""

    start: int
    end: int
    slot: int
    stride: int
    kv_lens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of each request."""
        return (self.end - self.start) // len(self.kv_lens)

    @property
    def longest(self) -> int:
        """Keys that the view holds per request."""
        return max(self.kv_lens)

    def mask(self, kv_lens: torch.Tensor, reach: Reach, dtype: torch.dtype) -> torch.Tensor:
        """Additive, `[requests, 1, 1, longest]`: 0 where a request's newest token sees the key, else -inf."""
        return decode_mask(kv_lens, self.longest, reach, dtype)


class DecodeTable(NamedTuple):
    """One token per request, read by tables of keys whose shape depends on two host integers alone.

    `first` and `kv_lens`, int64 `[rows]`: a request's first slot, and how many hold its keys. `length`: columns.
    """

    first: torch.Tensor
    kv_lens: torch.Tensor
    length: int

    @classmethod
    def plan(cls, spans: Sequence[Span], rows: int, length: int, padding_slot: int) -> DecodeTable:
        """Of one-token spans, and padding up to `rows` that reads one key of a slot of its own."""
        padding = rows - len(spans)
        first = [span.slot for span in spans] + [padding_slot] * padding
        return cls(torch.tensor(first), torch.tensor([span.kv_len for span in spans] + [1] * padding), length)

    def slots(self) -> torch.Tensor:
        """int64 `[rows, length]`. Behind a request's keys its last one is repeated: nobody else's is ever read."""
        key = torch.arange(self.length, device=self.first.device)
        return self.first[:, None] + torch.minimum(key, self.kv_lens[:, None] - 1)


class NativeReads(NamedTuple):
    """The first tokens of a batch, whose keys our own kernels read.

    `first` and `kv_lens`, int64 `[tokens]`: the slot of the first key that a token may see, and the number of keys up
    to its own; `by_reach`: the same for layers that see less.
    """

    kernels: NativeKernels
    first: torch.Tensor
    kv_lens: torch.Tensor
    by_reach: dict[Reach, tuple[torch.Tensor, torch.Tensor, int]]

    @classmethod
    def plan(cls, kernels: NativeKernels, spans: Sequence[Span]) -> NativeReads:
        """Of spans that follow each other from the batch's first token on."""
        counts = [span.end - span.start for span in spans]
        first = np.repeat([span.slot for span in spans], counts)
        behind = np.repeat([span.kv_len - span.end for span in spans], counts)
        kv_lens = np.arange(1, spans[-1].end + 1) + behind
        return cls(kernels, torch.from_numpy(first), torch.from_numpy(kv_lens), {})

    def seen(self, reach: Reach) -> tuple[torch.Tensor, torch.Tensor, int]:
        """First slots, numbers of keys, and the largest of these, for layers of one reach; once per step."""
        if reach not in self.by_reach:
            hidden = reach.first_of(self.kv_lens - 1)
            lens = self.kv_lens - hidden
            self.by_reach[reach] = self.first + hidden, lens, int(lens.max())
        return self.by_reach[reach]


@dataclass(frozen=True)
class AttentionBatch:
    """Where each token of a step reads and writes. Host integers, but for `out_cache_loc`, the slot per token, and, if
    there are groups, `kv_lens`, the keys of each token's request; both int64 `[tokens]`.

    With a `table` there are neither spans nor groups, and `out_cache_loc` covers padding too; `table_slots` are the
    slots that it reads, made on the device by `opened`.

    `native` tokens are in no span and no group.

    With a latent cache, which a model expands to keys and values itself, `gathered` holds the slots that are read,
    int64 `[keys of all spans]`, and `Span.slot` counts within them.
    """

    pool: KVPool
    spans: list[Span]
    groups: list[Group]
    out_cache_loc: torch.Tensor
    batch_invariant: bool
    gathered: torch.Tensor | None = None
    kv_lens: torch.Tensor | None = None
    table: DecodeTable | None = None
    table_slots: torch.Tensor | None = None
    native: NativeReads | None = None
    _masks: dict[tuple[int, Reach], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def plan(
        cls,
        pool: KVPool,
        spans: list[Span],
        out_cache_loc: torch.Tensor,
        batch_invariant: bool,
        kernels: NativeKernels | None = None,
    ) -> AttentionBatch:
        """Gather decodes whose slots are evenly spaced; in batch-invariant mode tokens that read equally many keys.

        With `kernels` these compute the decodes that come first, in batch-invariant mode all tokens.
        """
        if pool.latent:
            return cls._plan_latent(pool, spans, out_cache_loc, batch_invariant)
        if kernels is not None:
            decodes = list(itertools.takewhile(lambda span: batch_invariant or span.end - span.start == 1, spans))
            native = NativeReads.plan(kernels, decodes) if decodes else None
            return cls(pool, spans[len(decodes) :], [], out_cache_loc, batch_invariant, native=native)
        runs = _even_runs(spans if batch_invariant else [s for s in spans if s.end - s.start == 1], batch_invariant)
        grouped = {span.start for run in runs for span in run}
        singles = [span for span in spans if span.start not in grouped]
        groups = [_group(run) for run in runs]
        masked = groups and not batch_invariant
        return cls(pool, singles, groups, out_cache_loc, batch_invariant, kv_lens=_kv_lens(spans) if masked else None)

    @classmethod
    def plan_table(
        cls, pool: KVPool, spans: Sequence[Span], out_cache_loc: torch.Tensor, rows: int, length: int
    ) -> AttentionBatch:
        """One token per request, padded to `rows`, with tables of `length` keys."""
        padded = torch.nn.functional.pad(out_cache_loc, (0, rows - len(out_cache_loc)), value=pool.padding_slot)
        return cls(pool, [], [], padded, False, table=DecodeTable.plan(spans, rows, length, pool.padding_slot))

    @classmethod
    def _plan_latent(
        cls, pool: KVPool, spans: list[Span], out_cache_loc: torch.Tensor, batch_invariant: bool
    ) -> AttentionBatch:
        read = [torch.arange(span.slot, span.slot + span.kv_len) for span in spans]
        slots = torch.cat(read) if read else torch.zeros(1, dtype=torch.int64)  # no key at all has no shape
        padding = slots[-1:].expand(-len(slots) % ROW_MULTIPLE)  # the expansion's rows keep their bits, see experts.py
        moved, offset = [], 0
        for span in spans:
            moved.append(span._replace(slot=offset))
            offset += span.kv_len
        return cls(pool, moved, [], out_cache_loc, batch_invariant, torch.cat([slots, padding]))

    def opened(self) -> AttentionBatch:
        """For one forward, on the device: what follows from the table is computed in it, so that a graph holds it."""
        if self.table is None:
            return self
        slots = self.table.slots()
        return replace(self, table_slots=slots, gathered=slots.flatten() if self.pool.latent else None, _masks={})

    def with_table(self, out_cache_loc: torch.Tensor, first: torch.Tensor, kv_lens: torch.Tensor) -> AttentionBatch:
        """The same over other tensors of the same shapes."""
        assert self.table is not None
        return replace(self, out_cache_loc=out_cache_loc, table=DecodeTable(first, kv_lens, self.table.length))

    def table_mask(self, reach: Reach, dtype: torch.dtype) -> torch.Tensor:
        """The table's mask for layers of one reach, `[rows, 1, 1, length]`, built once per forward."""
        assert self.table is not None
        if (0, reach) not in self._masks:
            self._masks[0, reach] = decode_mask(self.table.kv_lens, self.table.length, reach, dtype)
        return self._masks[0, reach]

    def mask(self, group: Group, reach: Reach, dtype: torch.dtype) -> torch.Tensor:
        """The group's mask for layers of one reach, built once per step."""
        key = group.start, reach
        if key not in self._masks and self.kv_lens is not None:
            self._masks[key] = group.mask(self.kv_lens[group.start : group.end], reach, dtype)
        return self._masks[key]

    def causal_mask(self, span: Span, reach: Reach, like: torch.Tensor) -> torch.Tensor:
        """`[tokens, keys]` of one request for layers of one reach, built once per step."""
        key = span.start, reach
        if key not in self._masks:
            self._masks[key] = causal_mask(span.end - span.start, span.kv_len, span.position, reach, like)
        return self._masks[key]

    def to_device(self, stream: Stream) -> AttentionBatch:
        """Copied without waiting."""
        return replace(
            self,
            out_cache_loc=stream.to_device(self.out_cache_loc),
            gathered=None if self.gathered is None else stream.to_device(self.gathered),
            kv_lens=None if self.kv_lens is None else stream.to_device(self.kv_lens),
            table=self.table
            and self.table._replace(
                first=stream.to_device(self.table.first), kv_lens=stream.to_device(self.table.kv_lens)
            ),
            _masks={},
        )


@dataclass
class _Run:
    """Neighbours in the batch that may share one view, and what a longer run must respect."""

    spans: list[Span]
    exact: bool
    stride: int = 0
    longest: int = 0
    total: int = 0
    room: int = 0

    def __post_init__(self) -> None:
        first = self.spans[0]
        self.longest = self.total = first.kv_len
        self.room = first.capacity

    def extend(self, span: Span) -> bool:
        """Take one more span, if its slots are as far from the last ones as those were, and its length is alike.

        A run reads, and masks, slots behind a request's keys, but never another request's: these may hold NaN, and
        0 * NaN is NaN. An `exact` run masks nothing.
        """
        last = self.spans[-1]
        if self.exact and (span.kv_len, span.position) != (last.kv_len, last.position):
            return False
        stride, longest = span.slot - last.slot, max(self.longest, span.kv_len)
        total, room = self.total + span.kv_len, min(self.room, span.capacity)
        read = (len(self.spans) + 1) * longest
        even = stride > 0 and (len(self.spans) == 1 or stride == self.stride) and span.start == last.end
        if not even or longest > room or read - total > MAX_MASKED * read:
            return False
        self.spans.append(span)
        self.stride, self.longest, self.total, self.room = stride, longest, total, room
        return True


def _even_runs(spans: Sequence[Span], exact: bool) -> list[list[Span]]:
    """Runs of two or more requests that share one strided view of the pool."""
    runs: list[_Run] = []
    for span in spans:
        if not runs or not runs[-1].extend(span):
            runs.append(_Run([span], exact))
    return [run.spans for run in runs if len(run.spans) > 1]


def _kv_lens(spans: Sequence[Span]) -> torch.Tensor:
    return torch.from_numpy(np.repeat([s.kv_len for s in spans], [s.end - s.start for s in spans]))


def _group(run: list[Span]) -> Group:
    stride = run[1].slot - run[0].slot
    return Group(run[0].start, run[-1].end, run[0].slot, stride, tuple(span.kv_len for span in run))
