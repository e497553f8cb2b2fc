"""The one seam into a model's routers: watch their choice, or answer it, while the model's own code does the rest.

A router selects with `torch.topk`; everything behind that call (renormalising, scaling, gathering weights) is the
model's and stays so. Answering the call with `(scores.gather(-1, forced), forced)` therefore recomputes the weights of
the forced experts from the live scores, differentiably. The answer is given by a `TorchFunctionMode`, which is local to
the thread and to the router's forward; torch itself is never patched.
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
_TOPK = frozenset({torch.topk, torch.Tensor.topk})
_JITTER = ("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")


class SelectionLog(TorchFunctionMode):
    """Notes the index tensor of each top-k call, and among how many scores it chose."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[torch.Tensor] = []
        self.widths: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.indices.append(out[1])
            self.widths.append((args[0] if args else (kwargs or {})["input"]).shape[-1])
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


def watch(model: Any, routers: list[FoundRouter], write: Callable[[int, torch.Tensor], None]) -> Callable[[], None]:
    """Call `write(site, ids)` with int64 `[tokens, K]` after each forward of each router; returns what undoes it.

    Routers that return their ids get a forward hook. The others are watched at their last top-k call, which must
    choose K of all experts; a forward of two tokens tells which is which.
    """
    undo: list[Callable[[], None]] = []
    for site, (router, returning) in enumerate(zip(routers, _which_return_ids(model, routers), strict=True)):
        make = _hooked if returning else _tapped
        undo.append(make(router, lambda ids, site=site: write(site, ids)))  # type: ignore[misc]

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
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
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


class ForcedSelection(TorchFunctionMode):
    """Answers the top-k call of one router forward with given ids.

    Args:
        forced: int64 `[rows, K]`.
        mask: bool `[rows]` or None; rows that are False keep the router's own choice.

    Attributes:
        native: int64 `[rows, K]`, what the router would have chosen; None before the call.
    """

    def __init__(self, forced: torch.Tensor, mask: torch.Tensor | None, name: str) -> None:
        super().__init__()
        self._forced, self._mask, self._name = forced, mask, name
        self.native: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        if self.native is not None:
            raise RuntimeError(f"router {self._name} selected twice in one forward")
        scores = args[0] if args else (kwargs or {})["input"]
        rows = scores.numel() // scores.shape[-1]
        if rows != len(self._forced):
            raise ValueError(
                f"router {self._name} sees {rows} tokens but the replay holds {len(self._forced)} rows; replay the "
                "batch that is forwarded, with all its padding"
            )
        self.native = out[1].reshape(rows, -1)
        ids = self._forced if self._mask is None else torch.where(self._mask[:, None], self._forced, self.native)
        ids = ids.view(out[1].shape)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


def check_forcible(router: FoundRouter, block: torch.nn.Module) -> None:
    """Run a router once on arbitrary input and require the one shape of code that can be forced exactly.

    Args:
        block: the module that owns the router; in some families it is the one that adds jitter.

    Raises:
        ValueError: by class name, with the reason.
    """
    module, site = router
    name = f"router {site.name} ({type(module).__name__})"
    weight = next(module.parameters(), None)
    if weight is None:
        raise ValueError(f"{name} has no weights; it cannot be replayed")
    if any(getattr(owner, key, None) for owner in (module, block) for key in _JITTER):
        raise ValueError(f"{name} adds jitter to its input; set the jitter to 0 in the config before replaying")
    hidden = torch.randn(2, weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        with torch.no_grad(), SelectionLog() as log:
            out = module.forward(hidden)
    except Exception as error:
        raise ValueError(
            f"{name} does not take hidden states alone ({error}); its family cannot be replayed yet"
        ) from error
    if not returns_ids(out):
        raise ValueError(f"{name} does not return (logits, weights, ids); its family cannot be replayed yet")
    if len(log.indices) != 1 or not torch.equal(log.indices[0], out[2]):
        raise ValueError(
            f"{name} selects in {len(log.indices)} top-k calls (group-limited routing, say); "
            "its family cannot be replayed yet"
        )


def wrap_forward(module: torch.nn.Module, wrap: Callable[[RouterForward], RouterForward]) -> Callable[[], None]:
    """Give one module `wrap(its forward)` as forward; returns what undoes it. Forwards are replaced only here."""
    module.forward = wrap(module.forward)
    return lambda: delattr(module, "forward")


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
