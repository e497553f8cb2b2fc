"""What an engine answered for one request, decoded but not believed yet, and the trace it becomes once checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from rollout.backend import SampleRequest
from rollout.engine_model import EngineModel
from rollout.stops import completion_text
from storage.trace import FINISH_REASONS, FinishReason, Trace, WeightSpan
from storage.validate import validate_trace


class EngineError(RuntimeError):
    """An engine refused a request, failed, or answered what cannot be; the message names the request."""


class EngineDeadError(EngineError):
    """The engine, or the connection to it, is gone. `ServedBackend` starts it again or looks whether it returned."""


@dataclass(frozen=True)
class EngineReply:
    """One sequence as the engine reports it.

    Attributes:
        logprob_ids: the tokens to which `logprobs` belong, as the engine names them.
        layers: integers `[rows, decoder layers, K]`, or None when the reply holds no routes.
        versions: `(weight version, first output token, last + 1)` spans in output tokens; empty for one version.
        recomputed: the engine evicted and recomputed this sequence: rows of what it knew then are not frozen.
    """

    output_ids: list[int]
    logprob_ids: list[int]
    logprobs: Sequence[float]
    layers: np.ndarray | None
    finish_reason: str
    stop_reason: int | str | None = None
    versions: Sequence[tuple[int, int, int]] = ()
    recomputed: bool = False


def trace_of(
    request: SampleRequest,
    reply: EngineReply,
    model: EngineModel,
    version: int,
    retractions: Literal["refuse", "invalidate"] = "refuse",
) -> Trace:
    """The checked trace of a reply. Its text is decoded here: not every engine sends one, and none the same.

    Args:
        version: the weights' version when the reply names none.
        retractions: what to do with a recomputed sequence: "refuse" it, or "invalidate" all its rows, since the engine
            does not say which were recomputed.

    Raises:
        ValueError: naming the request and what cannot be.
    """
    name = f"trace {request.sample_id!r}"
    if reply.finish_reason not in FINISH_REASONS or reply.finish_reason == "error":
        raise ValueError(f"{name}: the engine ended it with {reply.finish_reason!r}")
    if len(reply.logprobs) != len(reply.output_ids):
        raise ValueError(f"{name}: {len(reply.logprobs)} logprobs for {len(reply.output_ids)} tokens")
    routes = None if reply.layers is None else model.sites(reply.layers, name)
    if not reply.output_ids:
        routes = None
    valid = None
    if reply.recomputed and routes is not None:
        if retractions == "refuse":
            raise ValueError(
                f"{name}: the engine retracted and recomputed it, so its routes are not those it was "
                "sampled with; give the engine more KV memory, or connect with retractions='invalidate'"
            )
        routes, valid = np.zeros_like(routes), np.zeros(len(routes), bool)
    params = request.sampling_params
    logprobs = np.asarray(reply.logprobs, np.float32)
    trace = Trace(
        sample_id=request.sample_id,
        step=request.step,
        group_id=request.group_id,
        prompt_ids=list(request.prompt_ids),
        completion_ids=reply.output_ids,
        logprobs=logprobs,
        raw_logprobs=logprobs if _draws_from_the_raw_distribution(request) else None,
        routed_experts=routes,
        route_start=request.routed_experts_start_len if routes is not None else 0,
        route_valid=valid,
        finish_reason=cast(FinishReason, reply.finish_reason),
        stop_reason=reply.stop_reason,
        weight_version=version,
        weight_versions=_row_spans(reply, len(request.prompt_ids), name),
        seed=request.seed,
        sampling_params=params.model_dump(mode="json"),
        text=completion_text(model.tokenizer, reply.output_ids, reply.stop_reason),
        metadata=request.metadata,
    )
    checked = validate_trace(trace, model.spec, reply.logprob_ids)
    for array in (checked.logprobs, checked.routed_experts):
        if array is not None:
            array.flags.writeable = False
    return checked


def failed_trace(request: SampleRequest, finish_reason: FinishReason, error: str | None) -> Trace:
    """A request that has no reply: aborted before it began, or with the error that ended it."""
    return Trace(
        sample_id=request.sample_id,
        step=request.step,
        group_id=request.group_id,
        prompt_ids=list(request.prompt_ids),
        completion_ids=[],
        logprobs=np.empty(0, np.float32),
        routed_experts=None,
        finish_reason=finish_reason,
        seed=request.seed,
        sampling_params=request.sampling_params.model_dump(mode="json"),
        metadata=request.metadata,
        error=error,
    )


def _row_spans(reply: EngineReply, prompt_len: int, name: str) -> list[WeightSpan]:
    """Output token j was sampled from row P - 1 + j; the prompt's rows before belong to the first span."""
    if not reply.versions or not reply.output_ids:
        return []
    starts, ends = [start for _, start, _ in reply.versions], [end for *_, end in reply.versions]
    if [*starts, len(reply.output_ids)] != [0, *ends]:
        text = f"version spans {list(reply.versions)} do not cover {len(reply.output_ids)} output tokens"
        raise ValueError(f"{name}: {text}")
    rows = [0, *(prompt_len - 1 + end for end in ends)]
    return [WeightSpan(v[0], start, end) for v, start, end in zip(reply.versions, rows, rows[1:], strict=False)]


def _draws_from_the_raw_distribution(request: SampleRequest) -> bool:
    p = request.sampling_params
    plain = p.top_p == 1 and p.top_k <= 0 and p.min_p == 0
    return not request.edits_logits and (p.temperature == 0 or (p.temperature == 1 and plain))
