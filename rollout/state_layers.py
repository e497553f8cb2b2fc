"""Linear-attention, convolution and state-space layers in the flattened batch: one state per request.

Such a layer carries a state from token to token instead of keys and values. Its module runs request by request, each
with its own state; everything around it, the experts first of all, runs over the whole batch. Which modules these are
is read from their code: their forward asks the cache for a state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from rollout.attention_plan import Span
from rollout.router import wrap_forward

STATE_CALLS = frozenset({"get_conv_state", "get_recurrent_state"})
CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")


def find_state_modules(model: Any) -> list[torch.nn.Module]:
    """Modules whose forward reads a convolution or recurrent state from the cache."""
    return [module for module in model.modules() if STATE_CALLS & _names_used(type(module).forward)]


def _names_used(forward: Callable[..., Any]) -> set[str]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return set(code.co_names) if code is not None else set()


class StateLayers:
    """Wraps the state modules of one model. States live from a request's first token until `forget`."""

    def __init__(self, model: Any) -> None:
        self._config = model.config.get_text_config()
        self._states: dict[int, DynamicCache] = {}
        self._spans: Sequence[Span] = ()
        self._undo = [
            wrap_forward(module, functools.partial(self._by_request, type(module).__name__))
            for module in find_state_modules(model)
        ]

    def begin(self, spans: Sequence[Span]) -> None:
        """Start a step; a request at position 0 gets a fresh state."""
        self._spans = spans
        for span in spans:
            if span.position == 0:
                self._states[span.slot] = DynamicCache(config=self._config)

    def forget(self, slot: int) -> None:
        """Drop the state of an ended request."""
        self._states.pop(slot, None)

    def close(self) -> None:
        """Give the modules their own forward back."""
        while self._undo:
            self._undo.pop()()

    def _by_request(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def flattened(*args: Any, **kwargs: Any) -> Any:
            tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
            parts = [self._one(forward, span, tokens, args, kwargs) for span in self._spans]
            return _joined(parts, tokens, name)

        return flattened

    def _one(
        self, forward: Callable[..., Any], span: Span, tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One request's tokens through the module, with its own state."""
        own = {name: _tokens_of(value, span, tokens) for name, value in kwargs.items()}
        own.update({name: self._states[span.slot] for name in CACHE_KEYWORDS if name in kwargs})
        return forward(*(_tokens_of(value, span, tokens) for value in args), **own)


def _tokens_of(value: Any, span: Span, tokens: int) -> Any:
    """The request's part of whatever has one entry per token in its second dimension."""
    if isinstance(value, tuple):
        return tuple(_tokens_of(item, span, tokens) for item in value)
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[1] == tokens:
        return value[:, span.start : span.end]
    return value


def _joined(parts: list[Any], tokens: int, name: str) -> Any:
    """The requests' outputs `[1, tokens, ...]` one behind the other; zeros for the padding behind them."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(column), tokens, name) for column in zip(*parts, strict=True))
    if parts[0] is None:
        return None
    out = torch.cat(parts, dim=1)
    if out.shape[1] > tokens or out.shape[0] != 1:
        raise ValueError(f"{name} returns {tuple(out.shape)} for {tokens} tokens; its state cannot be kept per request")
    padding = out.new_zeros(1, tokens - out.shape[1], *out.shape[2:])
    return torch.cat([out, padding], dim=1) if padding.shape[1] else out
