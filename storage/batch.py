"""ReplayBatch: traces of different lengths as one rectangle, for a trainer's forward under router replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from storage.trace import RoutingSpec, Trace, WeightSpan

if TYPE_CHECKING:
    import torch

PADDINGS = ("right", "left")


@dataclass(frozen=True)
class ReplayBatch:
    """B traces padded to S tokens; every array is aligned to input_ids.

    >>> batch = ReplayBatch.collate(traces, spec=ds.spec)  # prompts of 3 and 5, completions of 2 and 4
    >>> batch.input_ids.shape, batch.routed_experts.shape, batch.num_rows
    ((2, 9), (2, 9, 8, 2), 18)

    Attributes:
        input_ids: int64 `[B, S]`, prompt and completion, else the pad token.
        attention_mask: int64 `[B, S]`, 1 at tokens.
        position_ids: int64 `[B, S]`, 0 at padding.
        completion_mask: bool `[B, S]`, True at sampled tokens.
        logprobs: float32 `[B, S]`, of the sampled token in the same column, 0 elsewhere.
        raw_logprobs: the same of the model's own distribution; None when a trace has none.
        routed_experts: `[B, S, sites, K]` of the spec's dtype, the routing of the token in the same column.
        route_mask: bool `[B, S]`, True where a valid row was recorded: not at padding, at missing rows
            or at the last sampled token, which was no input of the rollout. Elsewhere routed_experts
            must not be read.
        rewards: float32 `[B]`, nan when a trace has none.
        sample_ids: B ids.
        weight_versions: B lists of spans, as in Trace.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    position_ids: np.ndarray
    completion_mask: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray | None
    routed_experts: np.ndarray
    route_mask: np.ndarray
    rewards: np.ndarray
    sample_ids: list[str]
    weight_versions: list[list[WeightSpan]]

    @classmethod
    def collate(
        cls, traces: Iterable[Trace], *, spec: RoutingSpec, padding: str = "right", pad_token_id: int = 0
    ) -> ReplayBatch:
        """Pad `traces` at the "right" or at the "left".

        Raises:
            ValueError: for no traces, another padding, or, naming the sample, for a trace without
                routes, with routes that do not fit `spec`, or with no prompt.
        """
        if padding not in PADDINGS:
            raise ValueError(f"padding {padding!r} is not supported; supported: {', '.join(PADDINGS)}")
        traces = list(traces)
        if not traces:
            raise ValueError("cannot collate an empty list of traces")
        for trace in traces:
            _check(trace, spec)
        longest = max(len(trace.token_ids) for trace in traces)
        batch = cls._empty(traces, longest, spec, pad_token_id)
        for row, trace in enumerate(traces):
            batch._fill(row, trace, start=longest - len(trace.token_ids) if padding == "left" else 0)
        return batch

    @property
    def num_rows(self) -> int:
        """B * S: the rows that a model's routers see in one forward of the batch."""
        return self.input_ids.size

    def model_inputs(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """input_ids, attention_mask and position_ids as tensors, for `model(**batch.model_inputs())`."""
        from storage.torch_view import tensors

        return tensors(self, ("input_ids", "attention_mask", "position_ids"), device)

    def tensors(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """Every array as a tensor, by its name here; on the CPU they share memory with the arrays."""
        from storage.torch_view import array_names, tensors

        return tensors(self, array_names(self), device)

    def token_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-softmax of `logits` `[B, S, V]` at the sampled tokens; see `storage.torch_view`."""
        from storage.torch_view import token_logprobs

        return token_logprobs(self, logits)

    @classmethod
    def _empty(cls, traces: Sequence[Trace], longest: int, spec: RoutingSpec, pad_token_id: int) -> ReplayBatch:
        shape = len(traces), longest
        raw = all(trace.raw_logprobs is not None for trace in traces)
        return cls(
            input_ids=np.full(shape, pad_token_id, np.int64),
            attention_mask=np.zeros(shape, np.int64),
            position_ids=np.zeros(shape, np.int64),
            completion_mask=np.zeros(shape, bool),
            logprobs=np.zeros(shape, np.float32),
            raw_logprobs=np.zeros(shape, np.float32) if raw else None,
            routed_experts=np.zeros((*shape, *spec.row_shape), spec.dtype),
            route_mask=np.zeros(shape, bool),
            rewards=np.array([np.nan if t.reward is None else t.reward for t in traces], np.float32),
            sample_ids=[trace.sample_id for trace in traces],
            weight_versions=[list(trace.weight_versions) for trace in traces],
        )

    def _fill(self, row: int, trace: Trace, start: int) -> None:
        tokens = slice(start, start + len(trace.token_ids))
        sampled = slice(start + len(trace.prompt_ids), tokens.stop)
        routed = slice(start + trace.route_start, start + trace.route_start + trace.route_len)
        self.input_ids[row, tokens] = trace.token_ids
        self.attention_mask[row, tokens] = 1
        self.position_ids[row, tokens] = np.arange(len(trace.token_ids))
        self.completion_mask[row, sampled] = True
        self.logprobs[row, sampled] = trace.logprobs
        if self.raw_logprobs is not None:
            self.raw_logprobs[row, sampled] = trace.raw_logprobs
        self.routed_experts[row, routed] = trace.routed_experts
        self.route_mask[row, routed] = True if trace.route_valid is None else trace.route_valid


def _check(trace: Trace, spec: RoutingSpec) -> None:
    name = f"trace {trace.sample_id!r}"
    if trace.routed_experts is None:
        raise ValueError(
            f"{name} has no routes: it was sampled with capture off, or ended ({trace.finish_reason!r}) "
            "before its first token; leave it out, or sample with enable_return_routed_experts=True"
        )
    if not trace.prompt_ids:
        raise ValueError(f"{name} has no prompt tokens, so nothing predicts its first token; leave it out")
    spec.check_routes(trace.routed_experts, name=name)
