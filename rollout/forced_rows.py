"""Some rows of an engine's forward take experts that are given; the others choose, in the same batch.

A sequence that is computed again must go the way it went when its tokens were sampled (DESIGN: frozen at sampling
time). The routers are wrapped only while such a forward runs: other steps pay nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.calibrate import check_mode, plans_of
from rollout.device import Stream
from rollout.forcing import ForcedSelection
from rollout.request import Request
from rollout.router import RouterForward, wrap_forward
from storage.sites import find_routers


class ForcedRows(NamedTuple):
    """Ids `[tokens, sites, K]` of a step, and bool `[tokens]`, which of them are to be forced."""

    ids: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def plan(cls, parts: Sequence[tuple[Request, int, int]], tokens: int) -> ForcedRows | None:
        """Of a step that computes positions `[start, end)` of these requests, one behind the other, then padding.

        None when it computes no row for the second time.
        """
        if not cls.needed(parts):
            return None
        routes = [request.routes.rows(start, request.frozen) if request.routes else () for request, start, _ in parts]
        shape, dtype = next((rows.shape[1:], rows.dtype) for rows in routes if isinstance(rows, np.ndarray))
        ids, mask, at = np.zeros((tokens, *shape), dtype), np.zeros(tokens, bool), 0
        for (_, start, end), rows in zip(parts, routes, strict=True):
            count = min(len(rows), end - start)
            if count > 0:
                ids[at : at + count], mask[at : at + count] = rows[:count], True
            at += end - start
        return cls(torch.from_numpy(ids), torch.from_numpy(mask))

    @staticmethod
    def needed(parts: Sequence[tuple[Request, int, int]]) -> bool:
        """Whether one of these rows was computed before."""
        return any(start < request.frozen for request, start, _ in parts)

    def to_device(self, stream: Stream) -> ForcedRows:
        """Copied without waiting."""
        return ForcedRows(stream.to_device(self.ids), stream.to_device(self.mask))


class RowForcing:
    """Forces rows of one model's forwards.

    Raises:
        ValueError: at construction, naming a router that cannot be forced exactly and why.
    """

    def __init__(self, model: Any) -> None:
        self._routers = find_routers(model)
        self._plans = plans_of(model, self._routers)

    @contextlib.contextmanager
    def __call__(self, rows: ForcedRows) -> Iterator[None]:
        """Force `rows` in the forwards inside, which take them one behind the other."""
        taken = [0] * len(self._routers)
        with contextlib.ExitStack() as stack:
            for site, router in enumerate(self._routers):
                wrap = functools.partial(self._forced, site, rows, taken)
                stack.callback(wrap_forward(router.module, wrap))
            yield
        if set(taken) != {len(rows.mask)}:
            raise RuntimeError(f"routers took {sorted(set(taken))} rows of {len(rows.mask)} that were to be forced")

    def _forced(self, site: int, rows: ForcedRows, taken: list[int], forward: RouterForward) -> RouterForward:
        (name, _, _, top_k), plan = self._routers[site].site, self._plans[site]
        check_mode(self._routers[site], plan)

        def forced(*args: Any, **kwargs: Any) -> Any:
            start = taken[site]
            end = taken[site] = start + _count_tokens(args, kwargs)
            ids, mask = rows.ids[start:end, site, :top_k].long(), rows.mask[start:end]
            with ForcedSelection(ids, mask, name, plan) as selection:
                output = forward(*args, **kwargs)
            selection.check_selected()
            return output

        return forced


def _count_tokens(args: Any, kwargs: Any) -> int:
    hidden = args[0] if args else next(iter(kwargs.values()))
    return int(hidden.numel() // hidden.shape[-1])


def try_forcing(model: Any) -> tuple[RowForcing | None, str]:
    """The forcing of a model, or None and why there is none."""
    try:
        return RowForcing(model), ""
    except ValueError as error:
        return None, str(error)
