"""How often each row's tokens occurred, kept on the device so that a step need not wait for the last sampled token."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rollout.device import Stream
from rollout.request import Request


@dataclass(frozen=True)
class PenaltyBatch:
    """The penalised rows of one step: their rows in the logits, their engine rows, and their penalties `[rows, 1]`.

    `starting` holds (engine row, prompt, completion) of sequences whose counts the device does not hold yet.
    """

    rows: torch.Tensor
    engine_rows: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    starting: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def to_device(self, stream: Stream) -> PenaltyBatch:
        """Copied without waiting."""
        moved = {name: stream.to_device(value) for name, value in vars(self).items() if name != "starting"}
        starting = [(row, stream.to_device(prompt), stream.to_device(done)) for row, prompt, done in self.starting]
        return PenaltyBatch(**moved, starting=starting)


class TokenCounts:
    """Counts of each engine row's completion tokens, and which tokens its prompt holds.

    They take 5 bytes times vocabulary times engine rows, from the first penalised request on. What the host notes when
    it plans a step is how many completion tokens a row's counts include; a row that went to another request, or whose
    sequence was continued or taken back, does not fit and is counted anew from its token ids.

    >>> counts = TokenCounts(num_rows=1)
    >>> plan = counts.plan([(0, request, 0)])  # prompt 5 7, repetition_penalty=2.0
    >>> logits = torch.ones(1, 8)
    >>> counts.penalise(logits, plan)
    >>> logits[0, 4:8].tolist()
    [1.0, 0.5, 1.0, 0.5]
    """

    def __init__(self, num_rows: int) -> None:
        self._included: list[tuple[weakref.ref[Request] | None, int]] = [(None, 0)] * num_rows
        self._completion = torch.empty(num_rows, 0, dtype=torch.int32)
        self._in_prompt = torch.empty(num_rows, 0, dtype=torch.bool)

    def plan(self, drawing: Sequence[tuple[int, Request, int]]) -> PenaltyBatch | None:
        """Host part. `drawing`: (row in the logits, request, completion tokens drawn before), all rows of a step."""
        drawing = [item for item in drawing if item[1].request.sampling_params.penalised]
        if not drawing:
            return None
        params = [request.request.sampling_params for _, request, _ in drawing]
        return PenaltyBatch(
            rows=torch.tensor([row for row, _, _ in drawing]),
            engine_rows=torch.tensor([request.row for _, request, _ in drawing]),
            repetition=_column([p.repetition_penalty for p in params]),
            frequency=_column([p.frequency_penalty for p in params]),
            presence=_column([p.presence_penalty for p in params]),
            starting=[
                (request.row, torch.tensor(request.request.prompt_ids), torch.tensor(request.output_ids).long())
                for _, request, drawn in drawing
                if not self._include(request, drawn)
            ],
        )

    def _include(self, request: Request, drawn: int) -> bool:
        """Note one more token of this row; False when its counts do not hold the `drawn` before it."""
        owner, included = self._included[request.row]
        current = owner is not None and owner() is request and included == drawn
        if not current and len(request.output_ids) != drawn:
            raise RuntimeError(
                f"{request.request.sample_id}: {drawn} tokens were drawn and {len(request.output_ids)} are known; "
                "a sequence continues from known tokens only"
            )
        self._included[request.row] = (weakref.ref(request), drawn + 1)
        return current

    def penalise(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        """Device part, in place: repetition, then frequency, then presence, as vLLM does."""
        self._reserve(logits)
        for row, prompt, completion in batch.starting:
            self._in_prompt[row].zero_().index_fill_(0, prompt, True)
            ones = torch.ones_like(completion, dtype=torch.int32)
            self._completion[row].zero_().index_add_(0, completion, ones)
        counts, values = self._completion[batch.engine_rows], logits[batch.rows]
        appeared = counts > 0
        scaled = torch.where(values > 0, values / batch.repetition, values * batch.repetition)
        values = torch.where(self._in_prompt[batch.engine_rows] | appeared, scaled, values)
        logits[batch.rows] = values - batch.frequency * counts - batch.presence * appeared

    def add(self, batch: PenaltyBatch, next_tokens: torch.Tensor) -> None:
        """Device part: count the tokens `[B]` just drawn."""
        self._completion[batch.engine_rows, next_tokens[batch.rows]] += 1

    def _reserve(self, logits: torch.Tensor) -> None:
        shape = len(self._included), logits.shape[-1]
        if self._completion.shape != shape:
            self._completion = logits.new_zeros(shape, dtype=torch.int32)
            self._in_prompt = logits.new_zeros(shape, dtype=torch.bool)


def _column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]
