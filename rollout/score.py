"""Teacher-forced logprobs and routes of given tokens: for reference policies, and to check what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from rollout.backend import Backend, ModelInfo, SampleRequest, Start
from rollout.requests import RequestBuilder
from rollout.sampling import SamplingParams
from storage.trace import Trace

Sequences = Sequence[Trace | Sequence[int]]


@dataclass(frozen=True, eq=False)
class Score:
    """What one forward over a sequence of T tokens gave.

    >>> (score,) = client.score([trace])  # 5 prompt and 3 completion tokens
    >>> score.raw_logprobs.shape, score.completion_logprobs.shape, score.routed_experts.shape
    ((7,), (3,), (7, 8, 2))

    Attributes:
        token_ids: the T tokens.
        prompt_len: P; a sequence given as token ids has one prompt token.
        raw_logprobs: float32 `[T - 1]`, the model's own log-softmax of `token_ids[1:]`.
        logprobs: the same under the distribution that `sampling_params` sample from.
        routed_experts: `[T - 1, sites, K]`, the experts used; None when recording is off.
        weight_version: of the weights that computed it.
    """

    token_ids: list[int]
    prompt_len: int
    raw_logprobs: np.ndarray
    logprobs: np.ndarray
    routed_experts: np.ndarray | None
    weight_version: int

    @property
    def completion_logprobs(self) -> np.ndarray:
        """`raw_logprobs` of the completion, `[T - P]`: what `Trace.raw_logprobs` holds under the same weights."""
        return self.raw_logprobs[self.prompt_len - 1 :]


def score_requests(
    builder: RequestBuilder, sequences: Sequences, params: SamplingParams, replay: bool
) -> list[SampleRequest]:
    """Checked requests that compute the sequences as prompts.

    Raises:
        ValueError, TypeError: a sequence or its routes do not fit, with its index.
    """
    params = SamplingParams(**params.model_dump() | {"max_tokens": 0, "min_tokens": 0, "prompt_logprobs": 0, "seed": 0})
    prompts = [s.token_ids if isinstance(s, Trace) else s for s in sequences]
    requests = builder.check(prompts, 1, params).requests(0, 0)
    for index, request in enumerate(requests):
        if len(request.prompt_ids) < 2:
            raise ValueError(f"sequence {index} has 1 token; its first token has no logprob, so it needs 2")
    if not replay:
        return requests
    routes = [_routes_of(index, sequence, builder.info) for index, sequence in enumerate(sequences)]
    return [replace(request, start=Start(rows)) for request, rows in zip(requests, routes, strict=True)]


def _routes_of(index: int, sequence: Trace | Sequence[int], info: ModelInfo) -> np.ndarray:
    if not info.captures_routes:
        raise ValueError("replay=True needs enable_return_routed_experts=True")
    if not isinstance(sequence, Trace) or sequence.routed_experts is None:
        raise ValueError(f"sequence {index} holds no routes to replay; pass a recorded Trace, or replay=False")
    missing = sequence.route_start or (sequence.route_valid is not None and not sequence.route_valid.all())
    if missing:
        raise ValueError(f"sequence {index} ({sequence.sample_id}) lacks the routes of some rows; use replay=False")
    rows = info.spec.check_routes(sequence.routed_experts, name=f"sequence {index} ({sequence.sample_id})")
    return rows[: len(sequence.token_ids) - 1]


def run_scores(backend: Backend, requests: Sequence[SampleRequest], sequences: Sequences) -> list[Score]:
    """Compute them, as many at once as the backend runs; in the order given.

    Raises:
        RuntimeError: a sequence could not be computed, with the engine's reason.
    """
    with closing(backend.stream(requests)) as stream:
        done = {trace.sample_id: trace for finished in stream for trace in finished.traces()}
    traces = [done[request.sample_id] for request in requests]
    return [_score(index, *pair) for index, pair in enumerate(zip(traces, sequences, strict=True))]


def _score(index: int, trace: Trace, sequence: Trace | Sequence[int]) -> Score:
    if trace.finish_reason != "length" or trace.prompt_logprobs is None or trace.raw_prompt_logprobs is None:
        raise RuntimeError(f"sequence {index} was not scored: {trace.error or trace.finish_reason}")
    routes = trace.routed_experts
    return Score(
        token_ids=trace.prompt_ids,
        prompt_len=len(sequence.prompt_ids) if isinstance(sequence, Trace) else 1,
        raw_logprobs=trace.raw_prompt_logprobs,
        logprobs=trace.prompt_logprobs,
        routed_experts=None if routes is None else routes[: len(trace.prompt_ids) - 1],
        weight_version=trace.weight_version,
    )
