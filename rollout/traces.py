"""The trace of a request that has ended."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout.request import Request
from rollout.stops import completion_text
from storage.trace import Trace


def trace_of(request: Request, tokenizer: Any, model: str | None = None) -> Trace:
    """Rows before `routed_experts_start_len` are left out; arrays are read-only, as they are over Ray.

    `model` is the fingerprint of the model.
    """
    asked = request.request
    text = _text_or_error(request, tokenizer)
    routes = _routes(request)
    return Trace(
        sample_id=asked.sample_id,
        step=asked.step,
        prompt_ids=list(asked.prompt_ids),
        completion_ids=request.output_ids,
        logprobs=_frozen(np.array(request.logprobs, np.float32)),
        raw_logprobs=_frozen(np.array(request.raw_logprobs, np.float32)),
        routed_experts=None if routes is None else _frozen(routes[asked.routed_experts_start_len :]),
        route_start=0 if routes is None else asked.routed_experts_start_len,
        finish_reason=request.finish_reason or "error",
        stop_reason=request.stop_reason,
        weight_version=request.weight_version,
        weight_versions=request.weight_spans(),
        group_id=asked.group_id,
        seed=asked.seed,
        sampling_params=asked.sampling_params.model_dump(mode="json"),
        text=text,
        metadata=asked.metadata,
        error=request.error,
        model=model,
        seconds=request.seconds,
        **(request.wanted.trace_fields(len(request.output_ids)) if request.wanted is not None else {}),
    )


def _routes(request: Request) -> np.ndarray | None:
    """None when ended before the first token; a row behind the last delivered token is left out."""
    ended_early = request.finish_reason in ("abort", "error")
    if request.routes is None or (ended_early and not request.output_ids):
        return None
    return request.routes.take(request.prompt_len + len(request.output_ids) - 1 if ended_early else None)


def _text_or_error(request: Request, tokenizer: Any) -> str | None:
    try:
        return completion_text(tokenizer, request.output_ids, request.stop_reason)
    except Exception as error:  # a tokenizer that cannot decode what the model drew: this request's error alone
        request.finish_reason, request.error = "error", f"{type(error).__name__}: {error}"
        return None


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
