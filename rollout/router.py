"""The one seam into a model's routers: watch their choice, or answer it, while the model's own code does the rest.

A router selects with `torch.topk`; everything behind that call (renormalising, scaling, gathering weights) is the
model's and stays so. Answering the call with `(scores.gather(-1, forced), forced)` therefore recomputes the weights of
the forced experts from the live scores, differentiably. The answer is given by a `TorchFunctionMode`, which is local to
the thread and to the router's forward; torch itself is never patched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from storage.sites import FoundRouter

RouterForward = Callable[..., Any]
_TOPK = frozenset({torch.topk, torch.Tensor.topk})
_JITTER = ("jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")


class SelectionLog(TorchFunctionMode):
    """Notes the index tensor of each top-k call."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.indices.append(out[1])
        return out


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
    if not (isinstance(out, tuple) and len(out) == 3 and isinstance(out[2], torch.Tensor)):
        raise ValueError(f"{name} does not return (logits, weights, ids); its family cannot be replayed yet")
    if len(log.indices) != 1 or not torch.equal(log.indices[0], out[2]):
        raise ValueError(
            f"{name} selects in {len(log.indices)} top-k calls (group-limited routing, say); "
            "its family cannot be replayed yet"
        )


@contextlib.contextmanager
def wrapped_forwards(routers: list[FoundRouter], wrap: Callable[[int, RouterForward], RouterForward]) -> Iterator[None]:
    """Give each router instance `wrap(site, its forward)` as forward; on leaving, by an error too, it is gone again."""
    with contextlib.ExitStack() as stack:
        for index, router in enumerate(routers):
            if "forward" in vars(router.module):
                raise RuntimeError(
                    f"router {router.site.name} is already wrapped: leave the other replay or record first"
                )
            router.module.forward = wrap(index, router.module.forward)
            stack.callback(delattr, router.module, "forward")
        yield
