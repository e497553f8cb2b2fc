"""Weights in Ray's object store: put there once, read in place by every actor of a node."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from actors.remote import fetch
from rollout.update_modes import Unchanging


@dataclass(frozen=True)
class StoredWeights:
    """References to buckets of weights. A node holds one copy, however many of its actors read it.

    >>> StoredWeights.put({"w": torch.ones(3)}.items()).tensors()
    {'w': tensor([1., 1., 1.])}
    """

    refs: tuple[Any, ...] = field(repr=False)
    num_bytes: int

    @classmethod
    def put(cls, named: Iterable[tuple[str, Any]]) -> StoredWeights:
        """Store tensors as they come; no more than one bucket is in this process at a time."""
        from rollout.weight_transfer import buckets

        refs, size = [], 0
        for bucket in buckets(named):
            flat = bucket.flat.cpu().numpy()
            refs.append(ray.put((bucket.entries, flat)))
            size += flat.nbytes
        return cls(tuple(refs), size)

    def tensors(self) -> Unchanging:
        """All tensors, as views of the object store. They must not be written."""
        named = Unchanging()
        for ref in self.refs:
            entries, flat = fetch(ref)
            named.update(_bucket(entries, flat).items())
        return named


def _bucket(entries: list[list[Any]], flat: np.ndarray) -> Any:
    import torch

    from rollout.weight_transfer import Bucket

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # it is read-only, and only read
        return Bucket(entries, torch.from_numpy(flat))
