"""RoutingSpec: the routers of one model. It fixes shape and dtype of every route."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np


class Site(NamedTuple):
    """One router: module name, decoder layer index, number of ids it can return, ids per token (K).

    >>> Site("model.layers.0.mlp.gate", layer=0, num_experts=16, top_k=2)
    """

    name: str
    layer: int
    num_experts: int
    top_k: int


@dataclass(frozen=True)
class RoutingSpec:
    """The routers of one model, in execution order, MoE layers only. Fixes shape and dtype of every route.

    >>> spec = RoutingSpec.uniform(num_sites=48, num_experts=128, top_k=8)
    >>> spec.row_shape, spec.dtype, spec.row_bytes
    ((48, 8), dtype('uint8'), 384)
    """

    sites: tuple[Site, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))  # a list would not be equal to what a file gives back
        if not self.sites:
            raise ValueError("a RoutingSpec needs at least one site; a dense model has no routes to record")
        for site in self.sites:
            if not 1 <= site.top_k <= site.num_experts <= 65536:
                raise ValueError(f"site {site.name!r}: need 1 <= top_k <= num_experts <= 65536, got {site}")

    @classmethod
    def uniform(cls, *, num_sites: int, num_experts: int, top_k: int) -> RoutingSpec:
        """A spec of equal sites named `site.0`, `site.1`, ... for tests and imported traces."""
        return cls(tuple(Site(f"site.{i}", i, num_experts, top_k) for i in range(num_sites)))

    @classmethod
    def from_model(cls, model: Any) -> RoutingSpec:
        """The spec of a transformers MoE model, read from the routers it declares (see storage/sites.py)."""
        from storage.sites import find_routers

        return cls(tuple(router.site for router in find_routers(model)))

    @property
    def num_sites(self) -> int:
        """Number of routers."""
        return len(self.sites)

    @cached_property
    def top_k(self) -> int:
        """K of the array: the largest of all sites; a site with fewer leaves its last slots 0, unread."""
        return max(site.top_k for site in self.sites)

    @cached_property
    def dtype(self) -> np.dtype:
        """uint8 when every site has at most 256 ids, else uint16. Never chosen from the data."""
        return np.dtype(np.uint8 if max(site.num_experts for site in self.sites) <= 256 else np.uint16)

    @property
    def row_shape(self) -> tuple[int, int]:
        """Shape of one row: (sites, K)."""
        return self.num_sites, self.top_k

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's routes."""
        return self.num_sites * self.top_k * self.dtype.itemsize

    def to_json(self) -> str:
        """Canonical JSON: equal specs give equal text."""
        return json.dumps({"sites": [site._asdict() for site in self.sites]}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RoutingSpec:
        """Inverse of `to_json`; raises ValueError on anything else."""
        try:
            return cls(tuple(Site(**site) for site in json.loads(text)["sites"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a RoutingSpec: {text[:200]!r} ({error})") from error

    @cached_property
    def _highest_ids(self) -> np.ndarray:
        """Largest id allowed per slot, `[sites, K]`: 0 in the slots a site does not use."""
        slots = np.arange(self.top_k)
        return np.stack([np.where(slots < site.top_k, site.num_experts - 1, 0) for site in self.sites])

    def check_routes(self, routes: np.ndarray, *, name: str) -> np.ndarray:
        """Return `routes` as C-contiguous `[rows, sites, K]` of `self.dtype`; ValueError if it cannot be."""
        if routes.ndim != 3 or routes.shape[1:] != self.row_shape:
            need = f"[rows, {self.num_sites}, {self.top_k}]"
            raise ValueError(f"{name}: routed_experts has shape {routes.shape}, need {need}")
        if routes.dtype.kind not in "iu":
            raise ValueError(f"{name}: routed_experts is {routes.dtype}, need integers")
        if len(routes):
            outside = routes.max(axis=0) > self._highest_ids
            if routes.dtype.kind == "i":
                outside |= routes.min(axis=0) < 0
            if outside.any():
                self._refuse_ids(routes, int(outside.any(axis=1).argmax()), name)
        return np.ascontiguousarray(routes, dtype=self.dtype)

    def _refuse_ids(self, routes: np.ndarray, index: int, name: str) -> None:
        site = self.sites[index]
        ids, unused = routes[:, index, : site.top_k], routes[:, index, site.top_k :]
        where = f"{name}: site {index} ({site.name})"
        if unused.any():
            row = int(unused.any(axis=1).argmax())
            raise ValueError(f"{where} uses {site.top_k} of {self.top_k} slots, the rest must be 0, in row {row} too")
        row = int(((ids < 0) | (ids >= site.num_experts)).any(axis=1).argmax())
        raise ValueError(
            f"{where} has an id in [{ids.min()}, {ids.max()}], need [0, {site.num_experts}), first in row {row}; "
            "were these routes recorded with another model?"
        )
