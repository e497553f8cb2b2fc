"""What a sequence has before it begins: recorded tokens to go on from, and frozen routes to recompute them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.backend import ModelInfo, SampleRequest, Start
from rollout.distinct import check_distinct
from rollout.sampling import SamplingParams
from storage.trace import Trace

ROOT = "resumed_from"
"""Metadata key: the sample id under which a continued sequence began. Its random numbers are that sample's."""


@dataclass(frozen=True)
class ResumedCall:
    """Recorded traces to go on with, checked.

    The merged trace is a new sample of the step that finishes it: `run/4/3.0-0/1` goes on where `run/3/0-0/1` ended. It
    keeps the group, the seed and the stream of random numbers.
    """

    run: str
    traces: list[Trace]
    sampling_params: list[SamplingParams]
    bad_word_ids: list[tuple[tuple[int, ...], ...]]

    def requests(self, step: int, call: int) -> list[SampleRequest]:
        """In the order of the traces."""
        parts = zip(self.traces, self.sampling_params, self.bad_word_ids, strict=True)
        return [self._request(trace, step, params, words) for trace, params, words in parts]

    def _request(
        self, trace: Trace, step: int, params: SamplingParams, bad_word_ids: tuple[tuple[int, ...], ...]
    ) -> SampleRequest:
        _, old_step, key, j = _named(trace)
        root = trace.metadata.get(ROOT, trace.sample_id)
        return SampleRequest(
            sample_id=f"{self.run}/{step}/{old_step}.{key}/{j}",
            step=step,
            prompt_ids=tuple(trace.prompt_ids),
            sampling_params=params,
            metadata={**trace.metadata, ROOT: root},
            bad_word_ids=bad_word_ids,
            group_id=trace.group_id,
            stream_id=root,
            start=_start(trace),
        )


def check_resumable(index: int, trace: Any, info: ModelInfo) -> None:
    """Whether a recorded trace can be continued exactly.

    Raises:
        TypeError, ValueError: naming the index and the sample, and what is wrong.
    """
    if not isinstance(trace, Trace):
        raise TypeError(f"resume {index} is {trace!r:.80}, need a Trace")
    name = f"resume {index} ({trace.sample_id})"
    if trace.finish_reason not in ("abort", "length"):
        raise ValueError(f"{name} ended with {trace.finish_reason!r}; only 'abort' and 'length' can go on")
    if None not in (trace.model, info.fingerprint) and trace.model != info.fingerprint:
        raise ValueError(
            f"{name} was sampled by a model with fingerprint {trace.model}, this one has {info.fingerprint}: "
            "config or tokenizer differ"
        )
    if any(not 0 <= token < info.vocab_size for token in trace.token_ids):
        raise ValueError(f"{name} has a token id outside the vocabulary [0, {info.vocab_size}); it is another model's")
    if not info.captures_routes or info.not_forced:
        why = info.not_forced or "it records no routes (enable_return_routed_experts=False)"
        raise ValueError(f"{name}: this engine cannot repeat recorded routes: {why}")
    if not trace.completion_ids:
        return
    if trace.routed_experts is None or trace.raw_logprobs is None:
        raise ValueError(f"{name} has no routes or no raw logprobs; sample its prompt again instead")
    if trace.route_start or (trace.route_valid is not None and not trace.route_valid.all()):
        raise ValueError(f"{name} lacks rows: all from position 0 on must be recorded and valid")
    try:
        check_distinct(info.spec, info.spec.check_routes(trace.routed_experts, name=name), None)
    except ValueError as error:
        raise ValueError(f"{name} does not fit this model: {error}") from error


def params_of(index: int, trace: Trace, given: SamplingParams | None) -> SamplingParams:
    """The trace's own parameters, or the given ones under its seed. `max_tokens` counts the whole completion.

    Raises:
        ValueError: another seed than the trace's, or no token left to sample.
    """
    params = SamplingParams(**trace.sampling_params) if given is None else given
    name = f"resume {index} ({trace.sample_id})"
    if params.seed is not None and trace.seed not in (None, params.seed):
        raise ValueError(f"{name} was sampled with seed {trace.seed}, not {params.seed}; leave the seed out")
    if params.max_tokens <= len(trace.completion_ids):
        raise ValueError(
            f"{name} has {len(trace.completion_ids)} completion tokens and max_tokens is {params.max_tokens}, which "
            "counts them too; pass sampling_params with a larger max_tokens"
        )
    recorded = 0 if trace.top_ids is None else trace.top_ids.shape[1]
    if trace.completion_ids and params.logprobs and params.logprobs != recorded:
        raise ValueError(
            f"{name} has {recorded} logprobs per token and {params.logprobs} are asked for; they are not computed again"
        )
    return params if params.seed is not None or trace.seed is None else params.model_copy(update={"seed": trace.seed})


def untouched(request: SampleRequest) -> Trace:
    """The trace of a request that ended before an engine took it: what it had when it was made."""
    start = request.start if request.start is not None and request.start.completion_ids else None
    return Trace(
        sample_id=request.sample_id,
        step=request.step,
        prompt_ids=list(request.prompt_ids),
        completion_ids=list(start.completion_ids) if start else [],
        logprobs=np.array(start.logprobs if start else (), np.float32),
        raw_logprobs=np.array(start.raw_logprobs if start else (), np.float32),
        routed_experts=start.routed_experts if start else None,
        weight_versions=start.weight_versions if start else (),
        finish_reason="abort",
        group_id=request.group_id,
        seed=request.seed,
        sampling_params=request.sampling_params.model_dump(mode="json"),
        metadata=request.metadata,
    )


def _named(trace: Trace) -> Sequence[str]:
    """(run, step, prompt key, j) of a sample id, of another form too."""
    parts = trace.sample_id.split("/")
    return parts if len(parts) == 4 else ("", str(trace.step), ".".join(parts), "0")


def _start(trace: Trace) -> Start | None:
    if not trace.completion_ids:
        return None
    assert trace.routed_experts is not None
    assert trace.raw_logprobs is not None
    return Start(
        completion_ids=tuple(trace.completion_ids),
        logprobs=tuple(trace.logprobs.tolist()),
        raw_logprobs=tuple(trace.raw_logprobs.tolist()),
        routed_experts=trace.routed_experts,
        weight_versions=tuple(trace.weight_versions),
        top=_top(trace),
    )


def _top(trace: Trace) -> tuple[np.ndarray, ...] | None:
    top = trace.top_ids, trace.top_logprobs, trace.raw_top_logprobs
    return None if any(values is None for values in top) else top  # type: ignore[return-value]
