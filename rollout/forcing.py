"""Answering the calls with which a router selects, so that it chooses given experts.

A router selects with `torch.topk`; everything behind that call (renormalising, scaling, gathering weights) is the
model's and stays so. Answering the call with `(scores.gather(-1, forced), forced)` therefore recomputes the weights of
the forced experts from the live scores, differentiably. The answer is given by a `TorchFunctionMode`, which is local to
the thread and to the router's forward; torch itself is never patched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from rollout.router import SelectionLog, scores_of, selects


class Plan(NamedTuple):
    """How one router selects.

    Attributes:
        calls: its selecting calls per forward: top-k, or maxima (phimoe).
        selecting: which of the top-k calls chooses the experts; of maxima, each chooses one.
        limiting: which top-k call chooses the groups of experts that a token may use, where weights are read from
            scores that are 0 outside them (deepseek_v2): unless it is answered too, a forced expert may have weight 0.
        per_group: experts in each of these groups.
        by_max: the calls are maxima, one after the other.
    """

    calls: int
    selecting: int
    limiting: int | None = None
    per_group: int = 1
    by_max: bool = False

    @property
    def steered(self) -> bool:
        """Whether an earlier answer changes what the router would choose later in the same forward."""
        return self.by_max or self.limiting is not None


def native_choice(plan: Plan, run: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    """A router's output and its own choice, int64 `[tokens, K]`."""
    with SelectionLog(by_max=plan.by_max) as log:
        output = run()
    chosen = [ids.reshape(-1, 1) for ids in log.indices] if plan.by_max else [log.indices[plan.selecting]]
    ids = torch.cat(chosen, -1)
    return output, ids.reshape(-1, ids.shape[-1])


class ForcedSelection(TorchFunctionMode):
    """Answers the selecting calls of one router forward with given ids.

    Args:
        forced: int64 `[rows, K]`.
        mask: bool `[rows]` or None; rows that are False keep the router's own choice.

    Attributes:
        native: int64 `[rows, K]`, what the router would have chosen; None before the call, and with a steered plan.
    """

    def __init__(self, forced: torch.Tensor, mask: torch.Tensor | None, name: str, plan: Plan) -> None:
        super().__init__()
        self._forced, self._mask, self._name, self._plan = forced, mask, name, plan
        self._calls = 0
        self.native: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not selects(func, out, self._plan.by_max):
            return out
        call, self._calls = self._calls, self._calls + 1
        ids = self._ids(call, scores_of(args, kwargs), out[1])
        return out if ids is None else _answer(scores_of(args, kwargs), out, ids)

    def check_selected(self) -> None:
        """After the forward: a router that took another path than when it was tried was not forced.

        Raises:
            RuntimeError: naming the router.
        """
        if self._calls != self._plan.calls:
            raise RuntimeError(
                f"router {self._name} selected in {self._calls} calls, but in {self._plan.calls} when it was tried; "
                "make a new RouterReplay after changing the model"
            )

    def _ids(self, call: int, scores: torch.Tensor, native: torch.Tensor) -> torch.Tensor | None:
        """The answer to one call; None leaves the router's own."""
        plan = self._plan
        if plan.by_max:
            return self._mixed(scores, native.reshape(-1, 1), self._forced[:, call : call + 1])
        native = native.reshape(-1, native.shape[-1])
        if call == plan.limiting:
            width = max(native.shape[-1], self._forced.shape[-1])
            return self._mixed(scores, _filled(native, width), _filled(self._forced // plan.per_group, width))
        if call != plan.selecting:
            return None
        self.native = None if plan.steered else native
        return self._mixed(scores, native, self._forced)

    def _mixed(self, scores: torch.Tensor, native: torch.Tensor, forced: torch.Tensor) -> torch.Tensor:
        rows = scores.numel() // scores.shape[-1]
        if rows != len(forced):
            raise ValueError(
                f"router {self._name} sees {rows} tokens but the replay holds {len(forced)} rows; replay the "
                "batch that is forwarded, with all its padding"
            )
        return forced if self._mask is None else torch.where(self._mask[:, None], forced, native)


def _filled(ids: torch.Tensor, width: int) -> torch.Tensor:
    """`[rows, width]`: the first of each row again in the missing columns, which names no further group."""
    return torch.cat([ids, ids[:, :1].expand(-1, width - ids.shape[-1])], -1)


def _answer(scores: torch.Tensor, native: Any, ids: torch.Tensor) -> Any:
    """What the call returns for `ids` `[rows, n]`, in its own layout: a maximum may drop the last axis."""
    wide = ids.view(*scores.shape[:-1], ids.shape[-1])
    values = scores.gather(-1, wide)
    if native[1].ndim < scores.ndim:
        values, wide = values.squeeze(-1), wide.squeeze(-1)
    return type(native)((values, wide))
