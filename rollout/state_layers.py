"""Linear-attention, convolution and state-space layers in the flattened batch: one state per request.

Such a layer carries a state from token to token instead of keys and values. Its module runs request by request, each
with its own state; everything around it, the experts first of all, runs over the whole batch. Which modules these are
is read from their code: their forward asks the cache for a state.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from rollout.attention_plan import Span
from rollout.router import wrap_forward

STATE_CALLS = frozenset({"get_conv_state", "get_recurrent_state", "get_linear_cache"})
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
        self._new_state = _state_maker(model)
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
                self._states[span.slot] = self._new_state()

    def forget(self, slot: int) -> None:
        """Drop the state of an ended request."""
        self._states.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        """The request's first slot is another one now."""
        self._states[target] = self._states.pop(source)

    def clear(self) -> None:
        """Drop all states."""
        self._states.clear()

    def close(self) -> None:
        """Give the modules their own forward back."""
        while self._undo:
            self._undo.pop()()

    def _by_request(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def flattened(*args: Any, **kwargs: Any) -> Any:
            tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
            parts = [self._one(forward, span, tokens, args, kwargs) for span in self._spans]
            return _joined(parts, self._spans, tokens, name)

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


def _joined(parts: list[Any], spans: Sequence[Span], tokens: int, name: str) -> Any:
    """The requests' outputs `[1, tokens, ...]` one behind the other; zeros for the padding behind them.

    Of a tuple, what follows the first output is joined if it has one entry per token, and is None otherwise: a state
    that a module also returns is nobody's input.
    """
    if isinstance(parts[0], tuple):
        first, *others = zip(*parts, strict=True)
        rest = [_padded(list(column), tokens) if _per_token(column, spans) else None for column in others]
        return _joined(list(first), spans, tokens, name), *rest
    if not _per_token(parts, spans):
        shapes = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in parts]
        raise ValueError(f"{name} returns {shapes[0]}, not one entry per token; its state cannot be kept per request")
    return _padded(parts, tokens)


def _per_token(parts: Sequence[Any], spans: Sequence[Span]) -> bool:
    return all(
        isinstance(part, torch.Tensor) and part.ndim >= 2 and part.shape[:2] == (1, span.end - span.start)
        for part, span in zip(parts, spans, strict=True)
    )


def _padded(parts: list[torch.Tensor], tokens: int) -> torch.Tensor:
    out = torch.cat(parts, dim=1)
    missing = tokens - out.shape[1]
    return torch.cat([out, out.new_zeros(1, missing, *out.shape[2:])], dim=1) if missing else out


def _state_maker(model: Any) -> Callable[[], DynamicCache]:
    """A family's own cache class, if its module defines one (minimax), else transformers' for its config."""
    module = sys.modules[type(model).__module__]
    own = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, DynamicCache) and thing.__module__ == module.__name__
    ]
    return own[0] if own else functools.partial(DynamicCache, config=model.config.get_text_config())
