"""The slow path: request by request with the model's own cache, for families whose state the slot pool cannot hold.

Linear attention, convolution, state-space layers and sparse indexers keep more than keys and values. Scheduling,
capture, sampling and traces are the same; the cost is one forward per request and step. Prompts are computed whole:
several of these families cannot continue a prompt from a state. A request's results do not depend on its neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from rollout.attention_plan import Span


class OwnCacheForward:
    """Keeps one cache per request, by its first slot."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._keyword = cache_keyword(model)
        self._caches: dict[int, Any] = {}

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, spans: Sequence[Span], rows: Sequence[int]
    ) -> torch.Tensor:
        """`[rows, vocab]` of a flattened batch; `rows` ascend and index its tokens."""
        parts = []
        for span in spans:
            wanted = [row - span.start for row in rows if span.start <= row < span.end]
            tokens = slice(span.start, span.end)
            logits = self._forward(span, input_ids[None, tokens], position_ids[None, tokens], wanted or [-1])
            if wanted:
                parts.append(logits)
        return torch.cat(parts) if parts else input_ids.new_zeros(0, 0, dtype=torch.float32)

    def forget(self, slot: int) -> None:
        """Drop the cache of an ended request."""
        self._caches.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        """The request's first slot is another one now."""
        self._caches[target] = self._caches.pop(source)

    def clear(self) -> None:
        """Drop all caches."""
        self._caches.clear()

    def _forward(self, span: Span, ids: torch.Tensor, positions: torch.Tensor, wanted: list[int]) -> torch.Tensor:
        cache = self._caches.get(span.slot) if span.position else None
        begun = {} if cache is None else {self._keyword: cache}
        output = self._model(input_ids=ids, position_ids=positions, use_cache=True, **begun)
        logits = output.logits[0, wanted]
        if not span.position:
            self._caches[span.slot] = _cache_of(output)
        elif cache is None:  # the step that would have made it failed and ended its requests: this result is nobody's
            logits = torch.full_like(logits, torch.nan)
        return logits


def cache_keyword(model: Any) -> str:
    """What a model's forward calls its cache: `cache`, before transformers 5.24 `past_key_values`."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _cache_of(output: Any) -> Any:
    cache = getattr(output, "cache", None)
    if cache is None:
        cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ValueError("this model returns no cache; it cannot generate step by step")
    return cache
