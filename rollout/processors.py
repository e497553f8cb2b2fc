"""Changes to the logits of some rows that can move the largest one, in vLLM's order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from rollout.device import Stream
from rollout.penalties import PenaltyBatch, TokenCounts
from rollout.request import Request
from rollout.sampling import SamplingParams

Tensors = TypeVar("Tensors", bound=tuple[torch.Tensor, ...])


@dataclass(frozen=True)
class LogitEdits:
    """What a step changes before temperature. Rows and ids are known on the host, so nothing synchronises.

    `allowed`: (row, the only ids it may draw). `forbidden`: (rows, ids). `words`: (rows, engine rows, id before, ids);
    the id is forbidden when the row's last token is the id before. `bias`: (rows, ids, values).
    """

    allowed: Sequence[tuple[int, torch.Tensor]] = ()
    forbidden: tuple[torch.Tensor, torch.Tensor] | None = None
    words: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    penalties: PenaltyBatch | None = None

    @classmethod
    def plan(cls, drawing: Sequence[tuple[int, Request, int]], counts: TokenCounts) -> LogitEdits | None:
        """From (row in the logits, request, completion tokens drawn before) of each row; None when nothing changes."""
        drawing = [item for item in drawing if item[1].request.edits_logits]
        if not drawing:
            return None
        forbidden = [(row, token) for row, request, drawn in drawing for token in _forbidden(request, drawn)]
        waiting = [(row, request.row, *word) for row, request, drawn in drawing for word in _waiting(request, drawn)]
        return cls(
            allowed=_allowed([(row, request.request.sampling_params) for row, request, _ in drawing]),
            forbidden=_pairs(forbidden),
            words=_words(waiting),
            bias=_bias([(row, request.request.sampling_params) for row, request, _ in drawing]),
            penalties=counts.plan(drawing),
        )

    @classmethod
    def stateless(cls, params: Sequence[SamplingParams]) -> LogitEdits | None:
        """Only what does not depend on the tokens before: allowed ids and bias of each row."""
        edits = cls(allowed=_allowed(list(enumerate(params))), bias=_bias(list(enumerate(params))))
        return edits if edits.allowed or edits.bias is not None else None

    def to_device(self, stream: Stream) -> LogitEdits:
        """Copied without waiting."""
        return replace(
            self,
            allowed=[(row, stream.to_device(ids)) for row, ids in self.allowed],
            forbidden=self.forbidden and _moved(self.forbidden, stream),
            words=self.words and _moved(self.words, stream),
            bias=self.bias and _moved(self.bias, stream),
            penalties=self.penalties and self.penalties.to_device(stream),
        )

    def apply(
        self, logits: torch.Tensor, last_token: torch.Tensor | None = None, counts: TokenCounts | None = None
    ) -> torch.Tensor:
        """A changed copy of float32 `[B, vocab]`; `last_token` holds the last drawn token of each engine row."""
        logits = logits.clone()
        for row, ids in self.allowed:
            kept = logits[row, ids]
            logits[row] = -torch.inf
            logits[row, ids] = kept
        if self.words is not None and last_token is not None:
            rows, engine_rows, before, ids = self.words
            change = torch.where(last_token[engine_rows] == before, -torch.inf, 0.0)
            logits.index_put_((rows, ids), change, accumulate=True)  # several words may end in one id
        if self.forbidden is not None:
            logits.index_put_(self.forbidden, logits.new_full((), -torch.inf))  # a Python number would synchronise
        if self.bias is not None:
            rows, ids, values = self.bias
            logits[rows, ids] += values
        if self.penalties is not None and counts is not None:
            counts.penalise(logits, self.penalties)
        return logits


def _moved(tensors: Tensors, stream: Stream) -> Tensors:
    return type(tensors)(map(stream.to_device, tensors))


def _forbidden(request: Request, drawn: int) -> Iterator[int]:
    """Stop tokens before `min_tokens`, and last tokens of bad words whose tokens before are all known and there."""
    if drawn < request.request.sampling_params.min_tokens:
        yield from request.stop.stop_token_ids
    for word in request.request.bad_word_ids:
        if len(word) == 1 or (drawn == len(request.output_ids) and request.output_ids[1 - len(word) :] == [*word[:-1]]):
            yield word[-1]


def _waiting(request: Request, drawn: int) -> Iterator[tuple[int, int]]:
    """(id before, last id) of bad words that lack only a token still on the device."""
    if drawn == len(request.output_ids):
        return
    for word in request.request.bad_word_ids:
        known = len(word) - 2
        if known >= 0 and request.output_ids[len(request.output_ids) - known :] == [*word[:-2]]:
            yield word[-2], word[-1]


def _allowed(rows: Sequence[tuple[int, SamplingParams]]) -> list[tuple[int, torch.Tensor]] | tuple[()]:
    return [(row, torch.tensor(p.allowed_token_ids)) for row, p in rows if p.allowed_token_ids is not None] or ()


def _bias(rows: Sequence[tuple[int, SamplingParams]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    entries = [(row, token, bias) for row, p in rows for token, bias in p.logit_bias.items()]
    if not entries:
        return None
    places = torch.tensor([entry[:2] for entry in entries])
    return places[:, 0], places[:, 1], torch.tensor([bias for _, _, bias in entries], dtype=torch.float32)


def _pairs(entries: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not entries:
        return None
    rows, ids = torch.tensor(entries).unbind(1)
    return rows, ids


def _words(
    entries: Sequence[tuple[int, int, int, int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
    if not entries:
        return None
    rows, engine_rows, before, ids = torch.tensor(entries).unbind(1)
    return rows, engine_rows, before, ids
