"""Optional logprobs: the most likely tokens at each completion token, and the logprobs of the prompt's own tokens.

Both come under the distribution that is sampled from and under the model's own; the most likely tokens are the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from rollout.device import Stream
from rollout.processors import LogitEdits
from rollout.request_logprobs import RequestLogprobs
from rollout.sampler import SamplingBatch, log_distributions
from rollout.sampling import SamplingParams
from rollout.scheduler import Work

BLOCK_ROWS = 256
"""Prompt positions that are turned into float32 logprobs at once: bounds the memory to rows x vocabulary."""


class Top(NamedTuple):
    """The n most likely tokens of R rows: ids int32, logprobs and raw_logprobs float32, all `[R, n]`."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    raw_logprobs: torch.Tensor


@dataclass(frozen=True)
class TopRows:
    """Rows of a step's draws whose n most likely tokens are wanted, and where each goes."""

    n: int
    rows: torch.Tensor
    into: list[tuple[RequestLogprobs, int]]

    @classmethod
    def plan(cls, drawing: Sequence[tuple[int, RequestLogprobs | None, int]]) -> list[TopRows]:
        """One for each n. `drawing`: (row, what its request wants, completion tokens drawn before)."""
        wanted = [(row, into, drawn) for row, into, drawn in drawing if into is not None and into.top_n]
        return [
            cls(
                n,
                torch.tensor([row for row, into, _ in wanted if into.top_n == n]),
                [(into, drawn) for _, into, drawn in wanted if into.top_n == n],
            )
            for n in dict.fromkeys(into.top_n for _, into, _ in wanted)
        ]

    def to_device(self, stream: Stream) -> TopRows:
        """Copied without waiting."""
        return replace(self, rows=stream.to_device(self.rows))

    def take(self, raw: torch.Tensor, processed: torch.Tensor, greedy: torch.Tensor) -> Taken:
        """From the log-probabilities `[B, vocab]` of the step's draws, and which of them are greedy."""
        raw, processed, greedy = raw[self.rows], processed[self.rows], greedy[self.rows]
        top = most_likely(raw, torch.where(greedy[:, None], raw, processed), self.n)
        return Taken(list(top), self._hand_out)

    def _hand_out(self, values: list[np.ndarray]) -> None:
        for index, (into, drawn) in enumerate(self.into):
            into.set_completion(drawn, tuple(value[index] for value in values))


@dataclass(frozen=True)
class PromptRows:
    """Some positions of one prompt: rows from `first` on of a step's logits, and the token after each."""

    first: int
    targets: torch.Tensor
    position: int
    into: RequestLogprobs
    sampling: SamplingBatch
    edits: LogitEdits | None

    @classmethod
    def plan(
        cls, first: int, start: int, tokens: Sequence[int], params: SamplingParams, into: RequestLogprobs
    ) -> list[PromptRows]:
        """Blocks for the prompt tokens `tokens`, which lie at `start + 1` on; their logits begin at row `first`."""
        blocks = []
        for at in range(0, len(tokens), BLOCK_ROWS):
            targets = torch.tensor(tokens[at : at + BLOCK_ROWS])
            rows = [params] * len(targets)
            sampling = SamplingBatch.build(rows, np.zeros(len(rows), np.float32))
            blocks.append(cls(first + at, targets, start + at, into, sampling, LogitEdits.stateless(rows)))
        return blocks

    def to_device(self, stream: Stream) -> PromptRows:
        """Copied without waiting."""
        edits = self.edits and self.edits.to_device(stream)
        targets = stream.to_device(self.targets)
        return replace(self, targets=targets, sampling=self.sampling.to_device(stream), edits=edits)

    def take(self, logits: torch.Tensor) -> Taken:
        """From all logits `[rows, vocab]` of the step."""
        given = logits[self.first : self.first + len(self.targets)].float()
        edited = None if self.edits is None else self.edits.apply(given)
        raw, processed = log_distributions(given, self.sampling, edited)
        chosen = [values.gather(-1, self.targets[:, None])[:, 0] for values in (processed, raw)]
        top = most_likely(raw, processed, self.into.prompt_top_n) if self.into.prompt_top_n else ()
        return Taken([*chosen, *top], lambda values: self.into.set_prompt(self.position, values))


@dataclass
class Taken:
    """Tensors of one step on their way to the requests that wanted them."""

    values: list[torch.Tensor]
    hand_out: Callable[[list[np.ndarray]], None]

    def copy_to_cpu(self, stream: Stream) -> None:
        """Start the copies."""
        self.values = [stream.to_host(value) for value in self.values]

    def finalize(self) -> None:
        """After the copies: hand out copies, since the host memory is lent again."""
        self.hand_out([value.numpy().copy() for value in self.values])


def most_likely(raw: torch.Tensor, processed: torch.Tensor, n: int) -> Top:
    """The n largest of each row of `raw` `[R, vocab]`, and what both distributions give them."""
    values, ids = raw.topk(n, dim=-1)
    return Top(ids.int(), processed.gather(-1, ids), values)


def plan_prompts(works: Iterable[tuple[int, Work]], first: int) -> tuple[list[int], list[PromptRows]]:
    """Rows of a step's tokens whose logits are wanted beyond the draws, and what to make of them.

    Args:
        works: (row of its first token, Work) of each work of the step.
        first: rows of logits that come before these.
    """
    rows: list[int] = []
    blocks: list[PromptRows] = []
    for begin, work in works:
        into, asked = work.request.wanted, work.request.request
        if into is not None and into.wants_prompt:
            targets = asked.prompt_ids[work.start + 1 : work.start + work.length + 1]
            blocks += PromptRows.plan(first + len(rows), work.start, targets, asked.sampling_params, into)
            rows += range(begin, begin + len(targets))
    return rows, blocks
