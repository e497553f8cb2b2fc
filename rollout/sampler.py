"""Draw one token per row. Rows never influence each other, so a row's result does not depend on its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from rollout.device import Stream
from rollout.sampling import SamplingParams


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of B rows as tensors, and which rows need which filter: known on the host, so nothing synchronises."""

    temperature: torch.Tensor
    uniform: torch.Tensor
    greedy: torch.Tensor
    all_greedy: bool
    any_greedy: bool
    any_scaled: bool
    min_p: tuple[torch.Tensor, torch.Tensor] | None
    top_k: list[tuple[int, torch.Tensor]]
    top_p: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], uniform: np.ndarray) -> SamplingBatch:
        """From one SamplingParams and one uniform number per row."""
        temperature = [p.temperature or 1.0 for p in params]
        drawn = [i for i, p in enumerate(params) if p.temperature > 0]
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32)[:, None],
            uniform=torch.from_numpy(uniform),
            greedy=torch.tensor([p.temperature == 0 for p in params]),
            all_greedy=not drawn,
            any_greedy=len(drawn) < len(params),
            any_scaled=any(t != 1.0 for t in temperature),
            min_p=_rows_and_values([(i, params[i].min_p) for i in drawn if params[i].min_p > 0]),
            top_k=_rows_by_k([(i, params[i].top_k) for i in drawn if params[i].top_k > 0]),
            top_p=_rows_and_values([(i, params[i].top_p) for i in drawn if params[i].top_p < 1]),
        )

    def to_device(self, stream: Stream) -> SamplingBatch:
        """Copied without waiting."""

        def moved(pair: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor] | None:
            return None if pair is None else (stream.to_device(pair[0]), stream.to_device(pair[1]))

        return replace(
            self,
            temperature=stream.to_device(self.temperature),
            uniform=stream.to_device(self.uniform),
            greedy=stream.to_device(self.greedy),
            min_p=moved(self.min_p),
            top_k=[(k, stream.to_device(rows)) for k, rows in self.top_k],
            top_p=moved(self.top_p),
        )


def _index(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _rows_and_values(pairs: Sequence[tuple[int, float]]) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not pairs:
        return None
    return _index([row for row, _ in pairs]), torch.tensor([[value] for _, value in pairs], dtype=torch.float32)


def _rows_by_k(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, torch.Tensor]]:
    """(k, rows int64) for each k of the batch."""
    return [(k, _index([row for row, each in pairs if each == k])) for k in dict.fromkeys(k for _, k in pairs)]


class Drawn(NamedTuple):
    """`[B]` each: next_tokens int64; logprobs float32 under the distribution drawn from (for greedy rows the raw
    log-softmax); raw_logprobs float32, the model's own log-softmax. And both distributions, `[B, vocab]`."""

    next_tokens: torch.Tensor
    logprobs: torch.Tensor
    raw_logprobs: torch.Tensor
    raw: torch.Tensor
    processed: torch.Tensor


def sample(logits: torch.Tensor, batch: SamplingBatch, edited: torch.Tensor | None = None) -> Drawn:
    """Draw from `[B, vocab]` logits, or from `edited`: the same in float32, changed by `LogitEdits`.

    A row of which nothing may be drawn, or that is not finite, gets a logprob that is not finite either.
    """
    logits = logits.float()
    raw, processed = log_distributions(logits, batch, edited)
    if not batch.any_greedy:
        tokens = _draw(processed, batch.uniform)
        chosen = _chosen(raw, tokens)
        return Drawn(tokens, chosen if processed is raw else _chosen(processed, tokens), chosen, raw, processed)
    greedy = (logits if edited is None else edited).argmax(-1)
    if batch.all_greedy:
        chosen = _chosen(raw, greedy)
        return Drawn(greedy, _unless_forbidden(chosen, greedy, edited), chosen, raw, raw)
    tokens = torch.where(batch.greedy, greedy, _draw(processed, batch.uniform))
    chosen = _chosen(raw, tokens)
    logprobs = torch.where(batch.greedy, _unless_forbidden(chosen, greedy, edited), _chosen(processed, tokens))
    return Drawn(tokens, logprobs, chosen, raw, processed)


def log_distributions(
    logits: torch.Tensor, batch: SamplingBatch, edited: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the model's own log-softmax, that of the distribution a token is drawn from) of float32 `[B, vocab]` logits.

    Greedy rows are not filtered: the sampler reports the model's own for them.
    """
    raw = logits.log_softmax(-1)
    if batch.all_greedy:
        return raw, raw
    return raw, _distribution(logits if edited is None else edited, raw, batch, edited is not None)


def _chosen(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return values.gather(-1, tokens[:, None])[:, 0]


def _unless_forbidden(logprobs: torch.Tensor, tokens: torch.Tensor, edited: torch.Tensor | None) -> torch.Tensor:
    """-inf where even the best token is forbidden, so that the request ends with an error."""
    return logprobs if edited is None else logprobs.masked_fill(_chosen(edited, tokens) == -torch.inf, -torch.inf)


def _distribution(allowed: torch.Tensor, raw: torch.Tensor, batch: SamplingBatch, edited: bool) -> torch.Tensor:
    """Log-probabilities after temperature, min_p, top_k, top_p, in this order; filtered tokens are -inf."""
    filtered = batch.min_p is not None or batch.top_k or batch.top_p is not None
    if not filtered and not batch.any_scaled and not edited:
        return raw
    logits = allowed / batch.temperature
    if batch.min_p is not None:
        rows, floor = batch.min_p
        probs = logits[rows].softmax(-1)
        logits[rows] = logits[rows].masked_fill(probs < floor * probs.amax(-1, keepdim=True), -torch.inf)
    for k, rows in batch.top_k:
        if k < logits.shape[-1]:
            given = logits[rows]
            kth = given.topk(k).values[:, -1:]
            logits[rows] = given.masked_fill(given < kth, -torch.inf)
    if batch.top_p is not None:
        rows, mass = batch.top_p
        logits[rows] = _keep_top_p(logits[rows], mass)
    return logits.log_softmax(-1)


def _keep_top_p(logits: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities reach `mass` (Holtzman et al. 2020)."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ranked.softmax(-1)
    outside = probs.cumsum(-1) - probs >= mass
    outside[:, 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -torch.inf)


def _draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: the first token whose cumulative probability exceeds u times the total.

    A token of probability zero adds nothing to the sum and can never be first. A row that is not finite draws the last
    token; its logprob is not finite either, which the engine reports.
    """
    cumulative = logprobs.exp().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_max(logprobs.shape[-1] - 1)
