"""What goes into one step, and what comes out of it: on the host, on the device, and on the host again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rollout.attention_plan import AttentionBatch, Span
from rollout.capture import RoutedExpertsOutput, RouteSegment
from rollout.cuda_graphs import Bucket
from rollout.device import Event, Stream
from rollout.forced_rows import ForcedRows
from rollout.logprobs import PromptRows, Taken, TopRows
from rollout.processors import LogitEdits
from rollout.sampler import SamplingBatch
from rollout.scheduler import Work


@dataclass
class ForwardBatch:
    """Inputs of one step. The first `len(decode_rows)` tokens were sampled by earlier steps: read on the device.

    Prepared on the host, and copied whole by `to_device`; `slots` and what is no tensor stay on the host. With a
    `bucket` all shapes that the forward sees are the bucket's.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    decode_rows: torch.Tensor
    spans: list[Span]
    slots: torch.Tensor
    attention: AttentionBatch
    logits_rows: torch.Tensor
    wanted_rows: list[int]
    num_padding: int
    sample_rows: torch.Tensor
    sampling: SamplingBatch | None
    edits: LogitEdits | None
    top: list[TopRows]
    prompts: list[PromptRows]
    segments: list[RouteSegment]
    forced: ForcedRows | None = None
    bucket: Bucket | None = None

    def to_device(self, stream: Stream) -> ForwardBatch:
        """Copied without waiting; on a CPU it is there already."""
        if stream.device.type == "cpu":
            return self
        moved: dict[str, Any] = {name: stream.to_device(getattr(self, name)) for name in _STEP_TENSORS}
        sampling = self.sampling and self.sampling.to_device(stream)
        edits = self.edits and self.edits.to_device(stream)
        moved |= {name: [rows.to_device(stream) for rows in getattr(self, name)] for name in ("top", "prompts")}
        forced = self.forced and self.forced.to_device(stream)
        attention = self.attention.to_device(stream)
        return replace(self, attention=attention, sampling=sampling, edits=edits, forced=forced, **moved)


def route_segments(batch: list[Work], spans: list[Span]) -> list[RouteSegment]:
    """Which rows of a step are whose, of the requests that record theirs. Once per step: see `Request.source`."""
    return [_segment(work, span) for work, span in zip(batch, spans, strict=True) if work.request.routes is not None]


def _segment(work: Work, span: Span) -> RouteSegment:
    request = work.request
    assert request.routes is not None
    source, request.source = request.source, None  # with its first step only
    return RouteSegment(
        span.start, span.end, work.start, request.routes, request.request.sample_id, request.frozen, source
    )


_STEP_TENSORS = ("input_ids", "position_ids", "decode_rows", "logits_rows", "sample_rows")


@dataclass
class GenerationBatchResult:
    """Outputs of one step: on the device when launched, on the host once `copy_done` is done.

    `next_tokens` int64, `logprobs` and `raw_logprobs` float32, all `[sampling requests]` in batch order.
    """

    step: int
    batch: list[Work]
    next_tokens: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None
    taken: list[Taken] = field(default_factory=list)
    routed_experts_output: RoutedExpertsOutput | None = None
    copy_done: Event = field(default_factory=Event)
    launched: float = field(default_factory=time.perf_counter)
    wait_seconds: float = 0.0
    finalize_seconds: float = 0.0

    def copy_to_cpu(self, stream: Stream) -> None:
        """Start the copies of all outputs; the event is recorded once, behind them."""
        if self.next_tokens is not None and self.logprobs is not None and self.raw_logprobs is not None:
            self.next_tokens = stream.to_host(self.next_tokens)
            self.logprobs = stream.to_host(self.logprobs)
            self.raw_logprobs = stream.to_host(self.raw_logprobs)
        for taken in self.taken:
            taken.copy_to_cpu(stream)
        if self.routed_experts_output is not None:
            self.routed_experts_output.copy_to_cpu(stream, self.copy_done)

    def finalize(self) -> None:
        """Wait for the copies and hand routes and optional logprobs to their requests."""
        asked = time.perf_counter()
        self.copy_done.synchronize()
        done = time.perf_counter()
        if self.routed_experts_output is not None:
            self.routed_experts_output.finalize()
        for taken in self.taken:
            taken.finalize()
        self.wait_seconds, self.finalize_seconds = done - asked, time.perf_counter() - done

    def outputs(self) -> list[tuple[int, float, float]]:
        """(token, logprob, raw logprob) of each sampling request, once: their host memory is given back."""
        if self.next_tokens is None or self.logprobs is None or self.raw_logprobs is None:
            read = []
        else:
            columns = self.next_tokens.tolist(), self.logprobs.tolist(), self.raw_logprobs.tolist()
            read = list(zip(*columns, strict=True))
        self.copy_done.release()
        return read
