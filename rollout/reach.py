"""How far back a layer looks, and the masks that say it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Reach(NamedTuple):
    """How far back a layer looks: all the way, over a sliding window, or to the start of a chunk of positions.

    >>> Reach(window=4).first(10), Reach(chunk=8).first(10), Reach().first(10)
    (7, 8, 0)
    """

    window: int | None = None
    chunk: int | None = None

    def first(self, position: int) -> int:
        """The first position that a query at `position` sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk is not None else 0

    def first_of(self, position: torch.Tensor) -> torch.Tensor:
        """The same for a tensor of positions, wherever it lies."""
        if self.window is not None:
            return (position - self.window + 1).clamp_min(0)
        return position // self.chunk * self.chunk if self.chunk is not None else torch.zeros_like(position)


def causal_mask(queries: int, keys: int, position: int, reach: Reach, like: torch.Tensor) -> torch.Tensor:
    """Additive `[queries, keys]` for queries at `position`, `position + 1`, ... and keys from position 0."""
    at = torch.arange(position, position + queries, device=like.device)[:, None]
    key = torch.arange(keys, device=like.device)
    return like.new_zeros(queries, keys).masked_fill_((key > at) | (key < reach.first_of(at)), -torch.inf)


def decode_mask(kv_lens: torch.Tensor, keys: int, reach: Reach, dtype: torch.dtype) -> torch.Tensor:
    """Additive `[requests, 1, 1, keys]` for the newest token of each request, which has so many keys."""
    last = kv_lens[:, None, None, None] - 1
    key = torch.arange(keys, device=kv_lens.device)
    hidden = (key > last) | (key < reach.first_of(last))
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
