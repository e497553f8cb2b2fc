"""Keys and values of all running requests in one pool of token slots, passed to the model as its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch


class SlotAllocator:
    """Hands out runs of consecutive slots, first fit, so that a request's keys are a view and never a gather.

    >>> slots = SlotAllocator(10)
    >>> slots.allocate(6), slots.allocate(6), slots.allocate(4)
    (0, None, 6)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]

    @property
    def free_slots(self) -> int:
        """Slots not in use; they may lie apart."""
        return sum(end - start for start, end in self._free)

    def allocate(self, count: int) -> int | None:
        """The first slot of a free run of `count`, or None when there is none at the moment."""
        for index, (start, end) in enumerate(self._free):
            if end - start >= count:
                self._free[index : index + 1] = [(start + count, end)] if end - start > count else []
                return start
        return None

    def resize(self, start: int, count: int, wanted: int) -> int | None:
        """Give a run `wanted` slots: in place if those behind it are free, else the first place that fits, which may
        overlap the old one. None, and nothing changes, when there is none.

        >>> slots = SlotAllocator(10)
        >>> slots.allocate(2), slots.allocate(2), slots.resize(2, 2, 4), slots.resize(0, 2, 4)
        (0, 2, 2, 6)
        """
        before = list(self._free)
        self.release(start, count)
        index = next(i for i, (a, b) in enumerate(self._free) if a <= start < b)
        a, b = self._free[index]
        if start + wanted > b:
            place = self.allocate(wanted)
            if place is None:
                self._free = before
            return place
        pieces = [(a, start), (start + wanted, b)]
        self._free[index : index + 1] = [piece for piece in pieces if piece[0] < piece[1]]
        return start

    def check(self, owned: Sequence[tuple[int, int]]) -> None:
        """The free runs and the `owned` ones, `[start, end)` each, cover all slots once.

        Raises:
            RuntimeError: naming the first slot that has no owner or two.
        """
        at = 0
        for start, end in sorted([*self._free, *owned]):
            if start != at:
                raise RuntimeError(f"slot {min(start, at)} {'leaked' if start > at else 'has two owners'}")
            at = end
        if at != self.size:
            raise RuntimeError(f"slot {min(at, self.size)} {'leaked' if at < self.size else 'does not exist'}")

    def release(self, start: int, count: int) -> None:
        """Return a run; neighbouring free runs merge."""
        end = start + count
        if start < 0 or end > self.size or any(start < b and a < end for a, b in self._free):
            raise AssertionError(f"slots [{start}, {end}) were released twice")
        merged = []
        for a, b in self._free:
            if b == start:
                start = a
            elif a == end:
                end = b
            else:
                merged.append((a, b))
        self._free = sorted([*merged, (start, end)])


class StepSlots(Protocol):
    """What the pool needs of a step: the slot that each token writes, and, in latent mode, all slots it reads."""

    @property
    def out_cache_loc(self) -> torch.Tensor:
        """int64 `[tokens]`, without padding."""

    @property
    def gathered(self) -> torch.Tensor | None:
        """int64 `[keys of all requests]`."""


class KVPool:
    """The cache object the model sees: `update` writes this step's keys and values into their slots.

    Each layer's tensors are `[slots, kv_heads, head_dim]`, allocated when the layer first writes: shapes may differ
    by layer, and between keys and values. With `latent` set, what is stored is what the model expands to keys and
    values by itself (multi-head latent attention), and `update` returns all that the step reads.

    Behind the slots that can be handed out lies one more, `padding_slot`, that rows of padding may write.
    """

    is_compileable = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.latent = False
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._batch: StepSlots | None = None
        self._offsets = torch.zeros(0, dtype=torch.int64)

    @property
    def padding_slot(self) -> int:
        """Belongs to no request."""
        return self.size

    def get_seq_length(self, *_: Any) -> torch.Tensor:
        """`[tokens]`: for each token of the step its position less its index in the batch.

        A model that computes `arange(tokens) + get_seq_length()` gets the positions; any other use of a tensor where
        one length was expected fails, or differs in the self-test.
        """
        return self._offsets

    def begin(self, batch: StepSlots, position_ids: torch.Tensor) -> None:
        """Start a step that writes and reads the slots of `batch`, over tokens at these positions, int64 `[tokens]`."""
        self._batch = batch
        self._offsets = position_ids - torch.arange(len(position_ids), device=position_ids.device)

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store `[1, heads, tokens, dim]` at the step's slots. Returns its arguments, since attention reads the pool;
        in latent mode the rows of all slots that the step reads."""
        if self._batch is None:
            raise RuntimeError("the pool was written outside of a step")
        self._write(self.keys, layer_idx, self._batch.out_cache_loc, key)
        self._write(self.values, layer_idx, self._batch.out_cache_loc, value)
        read = self._batch.gathered
        if read is None:
            return key, value
        stores = self.keys[layer_idx], self.values[layer_idx]
        return stores[0][read].transpose(0, 1)[None], stores[1][read].transpose(0, 1)[None]

    def reset(self, latent: bool) -> None:
        """Forget all layers and choose the mode."""
        self.keys.clear()
        self.values.clear()
        self.latent = latent

    @property
    def token_bytes(self) -> int:
        """Bytes that one slot takes in all layers that wrote so far."""
        return sum(store[0].nbytes for store in (*self.keys.values(), *self.values.values()))

    def resize(self, size: int) -> None:
        """Change the number of slots; what they held is forgotten.

        Raises:
            ValueError: the memory for them cannot be had.
        """
        self.size = size
        try:
            for store in (self.keys, self.values):
                for layer, old in store.items():
                    store[layer] = lazy_zeros((size + 1 if size else 0, *old.shape[1:]), old.dtype, old.device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ValueError(f"kv_tokens={size} does not fit into memory ({error}); choose a smaller pool") from error

    def clear(self, slot: int, count: int) -> None:
        """Zero `count` slots in all layers. Grouped attention reads slots that it masks, and 0 * NaN is NaN."""
        for store in (*self.keys.values(), *self.values.values()):
            store[slot : slot + count].zero_()

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` slots in all layers to a place that does not overlap."""
        for store in (*self.keys.values(), *self.values.values()):
            store[target : target + count] = store[source : source + count]

    def move(self, source: int, target: int, count: int) -> None:
        """Move `count` slots in all layers; the vacated ones are zero. The places may overlap."""
        for store in (*self.keys.values(), *self.values.values()):
            moved = store[source : source + count].clone()
            store[source : source + count].zero_()
            store[target : target + count] = moved

    def _write(self, store: dict[int, torch.Tensor], layer: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        rows = states[0].transpose(0, 1)
        if layer not in store:
            store[layer] = lazy_zeros((self.size + 1, *rows.shape[1:]), rows.dtype, rows.device)
        store[layer].index_copy_(0, slots, rows[: len(slots)])


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU their pages cost no memory until they are written (torch.zeros writes them all)."""
    size = int(np.prod(shape)) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)
