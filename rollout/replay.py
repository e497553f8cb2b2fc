"""RouterReplay: the trainer's forward takes the recorded experts, the router's weights stay live."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from rollout.calibrate import check_mode, plans_of
from rollout.forcing import ForcedSelection, native_choice
from rollout.packing import check_packable
from rollout.router import RouterForward, wrapped_forwards
from rollout.start import check_distinct
from storage.batch import ReplayBatch
from storage.sites import find_routers
from storage.trace import RoutingSpec


@dataclass(frozen=True)
class ReplayReport:
    """What the last replay context did, over all its forwards.

    Attributes:
        sites_used: sites whose forward ran under replay, of `num_sites`.
        rows: tokens forwarded per site, padding too.
        missing_share: share of the rows that a full recording has which were absent and kept their native choice;
            padding and the last sampled token of a sequence have none.
        flipped_share: share of forced (token, site) pairs whose live choice is another *set* of experts.
        flipped_per_site: the same by site.
        reordered_share: share with the same set in another order.
    """

    sites_used: int
    num_sites: int
    rows: int
    missing_share: float
    flipped_share: float
    flipped_per_site: list[float]
    reordered_share: float


class Recorded:
    """What `RouterReplay.record` saw."""

    def __init__(self, spec: RoutingSpec) -> None:
        self._spec = spec
        self._ids: list[list[torch.Tensor]] = [[] for _ in spec.sites]

    def add(self, site: int, ids: torch.Tensor) -> None:
        """Append one forward's ids `[rows, K]` of a site."""
        self._ids[site].append(ids.detach())

    @property
    def routed_experts(self) -> np.ndarray:
        """`[rows, sites, K]` of the spec's dtype, the rows of all forwards in order."""
        counts = {sum(len(part) for part in parts) for parts in self._ids}
        if counts == {0} or len(counts) != 1:
            raise RuntimeError(
                f"sites recorded {sorted(counts)} rows; run whole forwards inside `with replay.record()`"
            )
        out = np.zeros((counts.pop(), *self._spec.row_shape), self._spec.dtype)
        for site, parts in enumerate(self._ids):
            out[:, site, : self._spec.sites[site].top_k] = torch.cat(parts).cpu().numpy()
        return out


class RouterReplay:
    """Forces the routers of one model instance; other models in the process are untouched.

    How each router selects is found by trying it on two tokens (rollout/calibrate.py). Layers that look experts up by
    token id (deepseek_v4's first) choose nothing: they are no sites and run as they are. A router that takes maxima
    (phimoe) replays in eval mode only.

    >>> replay = RouterReplay(model)
    >>> with replay(ReplayBatch.collate(traces, spec=replay.spec)) as batch:
    ...     loss(model(**batch.model_inputs())).backward()      # open through backward, for checkpointing
    >>> replay.report().flipped_share
    0.0142

    Raises:
        ValueError: at construction, naming a router that cannot be forced exactly and why.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"RouterReplay takes a loaded model, got {type(model).__name__}")
        self._model = model
        self._routers = find_routers(model)
        self._plans = plans_of(model, self._routers)
        self.spec = RoutingSpec(tuple(router.site for router in self._routers))
        self._counts = _Counts(self.spec.num_sites)
        self._packable = False

    @contextlib.contextmanager
    def __call__(self, batch: ReplayBatch | np.ndarray) -> Iterator[Any]:
        """Force `batch`, or ids `[rows, sites, K]`, in every forward inside. Yields its argument.

        Rows of a ReplayBatch are its `[B, S]` positions, flattened; those outside `route_mask` keep the native choice.

        Raises:
            ValueError: before any forward, for ids of another shape, out of range, or twice in a row, and for a packed
                batch of which `check_packable` refuses the model; in the forward, for a number of tokens not its rows.
            RuntimeError: on leaving, when not every site ran: the forward was cut short, or was another model's.
        """
        rows = _Rows(*self._rows_of(batch))
        if isinstance(batch, ReplayBatch) and batch.cu_seqlens is not None and not self._packable:
            check_packable(self._model)
            self._packable = True
        self._counts = _Counts(self.spec.num_sites, missing=_missing_share(batch))
        with wrapped_forwards(self._routers, lambda site, forward: self._forced(site, forward, rows)):
            yield batch
        self._counts.check_all_ran([site.name for site in self.spec.sites])

    @contextlib.contextmanager
    def record(self) -> Iterator[Recorded]:
        """Record the model's own choice in every forward inside; no logit changes.

        Raises:
            ValueError: with gradient checkpointing and gradients on, which would run each router twice.
        """
        if torch.is_grad_enabled() and _is_checkpointing(self._model):
            raise ValueError("gradient checkpointing runs each router twice: record under torch.no_grad()")
        recorded = Recorded(self.spec)

        def wrap(site: int, forward: RouterForward) -> RouterForward:
            def recording(*args: Any, **kwargs: Any) -> Any:
                check_mode(self._routers[site], self._plans[site])
                out, ids = native_choice(self._plans[site], partial(forward, *args, **kwargs))
                recorded.add(site, ids)
                return out

            return recording

        with wrapped_forwards(self._routers, wrap):
            yield recorded

    def report(self) -> ReplayReport:
        """Figures of the last replay context. Reads the device's counters, so call it outside the hot path."""
        return self._counts.report()

    def _rows_of(self, batch: ReplayBatch | np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        if isinstance(batch, ReplayBatch):
            ids = batch.routed_experts.reshape(-1, *batch.routed_experts.shape[2:])
            mask = batch.route_mask.reshape(-1)
        elif isinstance(batch, np.ndarray):
            ids, mask = batch, None
        else:
            raise TypeError(
                f"replay takes a ReplayBatch or ids [rows, sites, K], got {type(batch).__name__}; "
                "ReplayBatch.collate(traces, spec=replay.spec) makes a batch of traces"
            )
        ids = self.spec.check_routes(ids, name="replay")
        check_distinct(self.spec, ids, mask)
        return torch.from_numpy(ids.copy()), None if mask is None else torch.from_numpy(mask.copy())

    def _forced(self, site: int, forward: RouterForward, rows: _Rows) -> RouterForward:
        (name, _, _, top_k), plan = self.spec.sites[site], self._plans[site]

        def replaying(*args: Any, **kwargs: Any) -> Any:
            device = args[0].device if args else next(iter(kwargs.values())).device
            ids, mask = rows.on(device)
            wide = ids[:, site, :top_k].long()  # one site at a time: int64 ids of all would be 8 times as large
            check_mode(self._routers[site], plan)
            with ForcedSelection(wide, mask, name, plan) as selection:
                out = forward(*args, **kwargs)
            selection.check_selected()
            native = selection.native
            if native is None:  # what it would have chosen is lost once an earlier choice is answered
                with torch.no_grad():
                    _, native = native_choice(plan, partial(forward, *args, **kwargs))
            self._counts.add(site, native, wide, mask)
            return out

        return replaying


class _Rows:
    """Ids `[rows, sites, K]` and mask `[rows]` of one context, moved to a device once."""

    def __init__(self, ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        self._ids, self._mask = ids, mask

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._ids.device != device:
            self._ids = self._ids.to(device)
            self._mask = None if self._mask is None else self._mask.to(device)
        return self._ids, self._mask


def _is_checkpointing(model: Any) -> bool:
    """transformers 5.24 renamed the property; the old one warns."""
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    return bool(next((getattr(model, name) for name in names if hasattr(type(model), name)), False))


def _missing_share(batch: ReplayBatch | np.ndarray) -> float:
    if not isinstance(batch, ReplayBatch):
        return 0.0
    due = int(batch.input_mask.sum())
    return int((batch.input_mask & ~batch.route_mask).sum()) / due if due else 0.0


class _Counts:
    """Per-site counters that stay on the device until they are read."""

    def __init__(self, num_sites: int, missing: float = 0.0) -> None:
        self._missing = missing
        self._rows = [0] * num_sites
        self._sums: list[torch.Tensor | None] = [None] * num_sites

    @torch.no_grad()
    def add(self, site: int, native: torch.Tensor, forced: torch.Tensor, mask: torch.Tensor | None) -> None:
        used = torch.ones(len(forced), dtype=torch.bool, device=forced.device) if mask is None else mask
        flipped = (native.sort(-1).values != forced.sort(-1).values).any(-1)
        reordered = (native != forced).any(-1) & ~flipped
        sums = torch.stack([used.sum(), (flipped & used).sum(), (reordered & used).sum()])
        previous = self._sums[site]
        self._sums[site] = sums if previous is None else previous + sums
        self._rows[site] += len(forced)

    def check_all_ran(self, names: list[str]) -> None:
        unused = [name for name, rows in zip(names, self._rows, strict=True) if not rows]
        if len(unused) == len(names):
            raise RuntimeError(
                "nothing was replayed: forward the model that RouterReplay was made of, not a copy of it"
            )
        if unused:
            raise RuntimeError(
                f"replay reached {len(names) - len(unused)} sites but not {unused[:3]}; was the forward cut short?"
            )

    def report(self) -> ReplayReport:
        sums = [[0, 0, 0] if s is None else s.tolist() for s in self._sums]
        forced, flipped, reordered = (sum(column) for column in zip(*sums, strict=True))
        return ReplayReport(
            sites_used=sum(count > 0 for count in self._rows),
            num_sites=len(self._rows),
            rows=max(self._rows),
            missing_share=self._missing,
            flipped_share=flipped / forced if forced else 0.0,
            flipped_per_site=[s[1] / s[0] if s[0] else 0.0 for s in sums],
            reordered_share=reordered / forced if forced else 0.0,
        )
