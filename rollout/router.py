"""The one seam into a model's routers: wrap their forwards, and watch the calls with which they select.

Forcing a choice is in rollout/forcing.py, finding out how a router selects in rollout/calibrate.py. Calls are watched
by a `TorchFunctionMode`, which is local to the thread and to the router's forward; torch itself is never patched.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from storage.sites import FoundRouter

RouterForward = Callable[..., Any]
WATCHED_TOKENS = 2
"""Tokens of the forward that `watch` makes to see what the routers return."""
_TOPK = frozenset({torch.topk, torch.Tensor.topk})
_MAX = frozenset({torch.max, torch.Tensor.max})


def selects(func: Any, out: Any, by_max: bool) -> bool:
    """Whether a torch call is one with which a router may select: a top-k, or a maximum along an axis."""
    return func in _MAX and isinstance(out, tuple) if by_max else func in _TOPK


def scores_of(args: Any, kwargs: Any) -> torch.Tensor:
    """The scores that a selecting call chooses from, `[..., experts]`."""
    scores: torch.Tensor = args[0] if args else kwargs["input"]
    return scores


class SelectionLog(TorchFunctionMode):
    """Notes the index tensor of each top-k call (or each maximum), and the scores that it chose from."""

    def __init__(self, by_max: bool = False) -> None:
        super().__init__()
        self._by_max = by_max
        self.indices: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    @property
    def widths(self) -> list[int]:
        """Among how many scores each call chose."""
        return [scores.shape[-1] for scores in self.scores]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if selects(func, out, self._by_max):
            self.indices.append(out[1])
            self.scores.append(scores_of(args, kwargs))
        return out


def returns_ids(output: Any) -> bool:
    """Whether a router's output is the usual `(logits, weights, ids)`."""
    return (
        isinstance(output, tuple)
        and len(output) == 3
        and isinstance(output[2], torch.Tensor)
        and output[2].ndim == 2
        and not output[2].is_floating_point()
    )


def returned_ids(output: Any) -> torch.Tensor | None:
    """The ids `[tokens, K]` among what a router returns, `(logits, weights, ids)` and perhaps more; None without."""
    return output[2] if isinstance(output, tuple) and returns_ids(output[:3]) else None


def watch(model: Any, routers: list[FoundRouter], write: Callable[[int, torch.Tensor], None]) -> Callable[[], None]:
    """Call `write(site, ids)` with int64 `[tokens, K]` after each forward of each router; returns what undoes it.

    Routers that return their ids get a forward hook. The others are watched at their last top-k call, which must
    choose K of all experts; a forward of two tokens tells which is which.
    """
    undo: list[Callable[[], None]] = []
    for site, (router, returning) in enumerate(zip(routers, _which_return_ids(model, routers), strict=True)):
        make = _hooked if returning else _tapped
        undo.append(make(router, functools.partial(write, site)))

    def stop() -> None:
        while undo:
            undo.pop()()

    return stop


@torch.inference_mode()
def _which_return_ids(model: Any, routers: list[FoundRouter]) -> list[bool]:
    seen: dict[int, bool] = {}
    handles = [
        router.module.register_forward_hook(lambda _, __, out, i=i: seen.__setitem__(i, returns_ids(out)))
        for i, router in enumerate(routers)
    ]
    try:
        model(input_ids=torch.zeros(1, WATCHED_TOKENS, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [seen.get(i, True) for i in range(len(routers))]


def _hooked(router: FoundRouter, write: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        write(output[2])

    return router.module.register_forward_hook(hook).remove


def _tapped(router: FoundRouter, write: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    def wrap(forward: RouterForward) -> RouterForward:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with SelectionLog() as log:
                output = forward(*args, **kwargs)
            write(_chosen(log, router))
            return output

        return watched

    return wrap_forward(router.module, wrap)


def _chosen(log: SelectionLog, router: FoundRouter) -> torch.Tensor:
    name, _, num_experts, top_k = router.site
    if log.indices and log.widths[-1] == num_experts and log.indices[-1].shape[-1] == top_k:
        return log.indices[-1].reshape(-1, top_k)
    found = [f"{ids.shape[-1]} of {width}" for ids, width in zip(log.indices, log.widths, strict=True)]
    raise ValueError(
        f"router {name} ({type(router.module).__name__}) does not choose {top_k} of {num_experts} experts in one top-k "
        f"call (it chose {', '.join(found) or 'in another way'}); its choice cannot be recorded"
    )


def wrap_forward(module: torch.nn.Module, wrap: Callable[[RouterForward], RouterForward]) -> Callable[[], None]:
    """Give one module `wrap(its forward)` as forward; returns what undoes it. Forwards are replaced only here.

    Wraps nest: the last one is the outermost, and is undone first.
    """
    before = vars(module).get("forward")
    module.forward = wrap(module.forward)

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


@contextlib.contextmanager
def wrapped_forwards(routers: list[FoundRouter], wrap: Callable[[int, RouterForward], RouterForward]) -> Iterator[None]:
    """Give each router instance `wrap(site, its forward)` as forward; on leaving, by an error too, it is gone again."""
    with contextlib.ExitStack() as stack:
        for index, router in enumerate(routers):
            if "forward" in vars(router.module):
                raise RuntimeError(
                    f"router {router.site.name} is already wrapped: leave the other replay or record first"
                )
            stack.callback(wrap_forward(router.module, functools.partial(wrap, index)))
        yield
