"""Which experts each token used, seen without the code under test, for every family.

Experts modules receive the chosen ids: forward pre-hooks see them. Three kinds of router hand over something else; for
these the choice is computed here, from what they score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from tests.rollout.oracle import Forward, Oracle

TOP_K = 2


def _top(scores: torch.Tensor, k: int = TOP_K) -> torch.Tensor:
    return torch.topk(scores.reshape(-1, scores.shape[-1]), k).indices


# By router class: the ids that follow from the router and its output.
COMPUTED: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "JetMoeTopKGating": lambda _, out: _top(out[4]),
    "Llama4Router": lambda _, out: _top(out[1], 1),
    # id 8 of 8 experts stands for none of them; the experts module gets a 0 for it, with weight 0
    "ZayaRouter": lambda router, out: _top(out[0].softmax(-1) + router.balancing_biases, 1),
}


class FamilyOracle(Oracle):
    """A checkpoint as transformers runs it. `forward` works for every family; greedy never stops at an end token."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> Forward:
        """All tokens in one forward without a cache."""
        seen: list[torch.Tensor] = []
        handles = list(_watch(self.model, seen))
        with _Scores() as scores:
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        deciding = np.stack([scores.behind(ids) for ids in seen], 1)
        return Forward(logits.double().numpy(), torch.stack(seen, 1).numpy(), deciding)


def _watch(model: Any, seen: list[torch.Tensor]) -> list[Any]:
    modules = dict(model.named_modules())
    routers = [module for module in modules.values() if type(module).__name__ in COMPUTED]
    if routers:
        return [router.register_forward_hook(_computed(seen)) for router in routers]
    experts = {name: module for name, module in modules.items() if type(module).__name__.endswith("Experts")}
    hooked = [module for name, module in experts.items() if not _by_token_id(modules[name.rpartition(".")[0]])]
    return [module.register_forward_pre_hook(_received(seen), with_kwargs=True) for module in hooked]


def _by_token_id(block: Any) -> bool:
    """deepseek_v4's first layers look experts up by token id: nothing is chosen, and nothing recorded."""
    return type(getattr(block, "gate", None)).__name__.endswith("HashRouter")


def _computed(seen: list[torch.Tensor]) -> Callable[[Any, Any, Any], None]:
    def hook(module: Any, _args: Any, out: Any) -> None:
        seen.append(COMPUTED[type(module).__name__](module, out))

    return hook


def _received(seen: list[torch.Tensor]) -> Callable[[Any, Any, Any], None]:
    def hook(_module: Any, args: Any, kwargs: Any) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        seen.extend(value.long() for value in given if value.ndim == 2 and not value.is_floating_point())

    return hook


class _Scores(TorchFunctionMode):
    """Notes what each top-k call of a forward chose from."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0] if args else (kwargs or {})["input"]
            self._calls.append((scores.reshape(-1, scores.shape[-1]).double(), out[1].reshape(-1, out[1].shape[-1])))
        return out

    def behind(self, ids: torch.Tensor) -> np.ndarray:
        """Float64 `[T, choices]`: the scores whose top-k gave `ids`; NaN, which proves no near-tie, without one."""
        for scores, indices in self._calls:
            if torch.equal(indices, ids):
                return scores.numpy()
        return np.full((len(ids), int(ids.max()) + 1), np.nan)
