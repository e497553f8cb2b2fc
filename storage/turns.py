"""MergedTrace: one sequence token by token, of a single trace or of the turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from storage.trace import Trace, WeightSpan


@dataclass(frozen=True)
class MergedTrace:
    """One sequence of T tokens in which sampled tokens need not be the last ones.

    Attributes:
        sample_id: of the last turn.
        turn_ids: sample ids of all turns.
        token_ids: int64 `[T]`.
        prompt_len: tokens of the first turn's prompt.
        sampled: bool `[T]`, True at tokens that the model sampled; tool and user tokens are False.
        logprobs, raw_logprobs: float32 `[T]`, 0 where not sampled; raw_logprobs is None when a turn has none.
        routed_experts: `[rows, sites, K]`, from position `route_start` on.
        route_valid: bool `[rows]`, or None when all are.
        num_rows: tokens that were inputs of the rollout: a full recording has as many rows.
        weight_versions: spans over those rows.
        reward: of the last turn.
    """

    sample_id: str
    turn_ids: list[str]
    token_ids: np.ndarray
    prompt_len: int
    sampled: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray | None
    routed_experts: np.ndarray
    route_start: int
    route_valid: np.ndarray | None
    num_rows: int
    weight_versions: list[WeightSpan]
    reward: float | None

    @classmethod
    def of(cls, trace: Trace) -> MergedTrace:
        """A single trace as it is; ValueError, naming it, without routes or prompt."""
        if trace.routed_experts is None:
            raise ValueError(
                f"trace {trace.sample_id!r} has no routes: it was sampled with capture off, or ended "
                f"({trace.finish_reason!r}) before its first token; leave it out, or sample with "
                "enable_return_routed_experts=True"
            )
        if not trace.prompt_ids:
            raise ValueError(
                f"trace {trace.sample_id!r} has no prompt tokens, so nothing predicts its first token; leave it out"
            )
        length, prompt = len(trace.token_ids), len(trace.prompt_ids)
        return cls(
            sample_id=trace.sample_id,
            turn_ids=[trace.sample_id],
            token_ids=np.array(trace.token_ids, np.int64),
            prompt_len=prompt,
            sampled=np.arange(length) >= prompt,
            logprobs=_behind_prompt(prompt, trace.logprobs),
            raw_logprobs=None if trace.raw_logprobs is None else _behind_prompt(prompt, trace.raw_logprobs),
            routed_experts=trace.routed_experts,
            route_start=trace.route_start,
            route_valid=trace.route_valid,
            num_rows=trace.num_rows,
            weight_versions=list(trace.weight_versions),
            reward=trace.reward,
        )


def merge_turns(traces: Iterable[Trace]) -> MergedTrace:
    """Join the turns of one conversation, in their order, to one sequence that `ReplayBatch.collate` takes.

    Each turn's prompt must start with all token ids of the turn before. A turn gives the rows from where the turn
    before ended; the first of them is that turn's last sampled token, which becomes an input only now. So a turn
    may carry all its rows or only the new ones (`route_start` up to there). A sampled token keeps the rows, the
    logprob and the weight version it was sampled with, even if a later turn computed it again.

    >>> first = Trace("c/0", 0, [1, 2], [3], [-0.5], np.zeros((2, 1, 1), int), "stop")
    >>> second = Trace("c/1", 0, [1, 2, 3, 7], [4], [-0.1], np.ones((2, 1, 1), int), "stop", route_start=2)
    >>> merged = merge_turns([first, second])
    >>> merged.sampled.tolist(), merged.routed_experts.ravel().tolist()
    ([False, False, True, False, True], [0, 0, 1, 1])

    Raises:
        ValueError: naming the turn and the position, for a prompt that is a fork of the turn before or tokenises it
            anew, for rows that no turn has, and for a turn without routes or of other sites.
    """
    turns = [MergedTrace.of(trace) for trace in traces]
    if not turns:
        raise ValueError("cannot merge an empty list of turns")
    _check_rows(turns[0], recorded=0, before="the conversation begins")
    for turn, following in pairwise(turns):
        _check_prefix(turn, following)
        _check_rows(following, recorded=turn.num_rows, before=f"turn {turn.sample_id!r} ends")
        if following.routed_experts.shape[1:] != turn.routed_experts.shape[1:]:
            shapes = f"{following.routed_experts.shape[1:]}, and {turn.sample_id!r} of {turn.routed_experts.shape[1:]}"
            raise ValueError(f"turn {following.sample_id!r} has rows of {shapes}: they are of different models")
    return _join(turns)


def clip_spans(spans: Sequence[WeightSpan], start: int, end: int) -> list[WeightSpan]:
    """The parts of `spans` within rows `[start, end)`.

    >>> clip_spans([WeightSpan(0, 0, 4), WeightSpan(1, 4, 9)], 2, 6)
    [WeightSpan(version=0, row_start=2, row_end=4), WeightSpan(version=1, row_start=4, row_end=6)]
    """
    clipped = (WeightSpan(s.version, max(s.row_start, start), min(s.row_end, end)) for s in spans)
    return [span for span in clipped if span.row_start < span.row_end]


def _behind_prompt(prompt: int, values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(prompt, np.float32), values])


def _check_prefix(turn: MergedTrace, following: MergedTrace) -> None:
    known, prompt = turn.token_ids, following.token_ids[: following.prompt_len]
    shared = min(len(known), len(prompt))
    different = np.flatnonzero(known[:shared] != prompt[:shared])
    name = f"turn {following.sample_id!r}"
    if len(different):
        at = int(different[0])
        values = f"position {at} is token {prompt[at]}, in turn {turn.sample_id!r} it is {known[at]}"
        if turn.sampled[at]:
            raise ValueError(
                f"{name} tokenises the completion before it anew: {values}; build its prompt from token ids, not text"
            )
        raise ValueError(f"{name} is a fork: {values}; merge each branch on its own")
    if len(prompt) < len(known):
        raise ValueError(
            f"{name} is a fork: its prompt ends at position {len(prompt)}, within the {len(known)} tokens of turn "
            f"{turn.sample_id!r}; merge each branch on its own, with turns in their order"
        )


def _check_rows(turn: MergedTrace, recorded: int, before: str) -> None:
    if turn.route_start > recorded:
        raise ValueError(
            f"turn {turn.sample_id!r} has a gap: its rows start at position {turn.route_start}, {before} at row "
            f"{recorded}; ask for rows from {recorded} on, or pass the turn that has them"
        )
    if turn.num_rows < recorded or turn.num_rows == 0:
        raise ValueError(
            f"turn {turn.sample_id!r} has a gap: it ended before position {recorded} was computed; leave it out"
        )


def _join(turns: list[MergedTrace]) -> MergedTrace:
    last, tokens = turns[-1], len(turns[-1].token_ids)
    bounds = list(pairwise([0] + [turn.num_rows for turn in turns]))
    pieces = [
        (turn, slice(a - turn.route_start, b - turn.route_start)) for turn, (a, b) in zip(turns, bounds, strict=True)
    ]
    sampled, logprobs, raw = np.zeros(tokens, bool), np.zeros(tokens, np.float32), np.zeros(tokens, np.float32)
    for turn in turns:
        sampled[: len(turn.token_ids)] |= turn.sampled
        logprobs[: len(turn.token_ids)] += turn.logprobs
        raw[: len(turn.token_ids)] += 0 if turn.raw_logprobs is None else turn.raw_logprobs
    return MergedTrace(
        sample_id=last.sample_id,
        turn_ids=[turn.sample_id for turn in turns],
        token_ids=last.token_ids,
        prompt_len=turns[0].prompt_len,
        sampled=sampled,
        logprobs=logprobs,
        raw_logprobs=None if any(turn.raw_logprobs is None for turn in turns) else raw,
        routed_experts=np.concatenate([turn.routed_experts[rows] for turn, rows in pieces]),
        route_start=0,
        route_valid=_join_valid(pieces),
        num_rows=last.num_rows,
        weight_versions=_join_spans(turns, bounds),
        reward=last.reward,
    )


def _join_valid(pieces: list[tuple[MergedTrace, slice]]) -> np.ndarray | None:
    if all(turn.route_valid is None for turn, _ in pieces):
        return None
    full = [
        np.ones(len(turn.routed_experts), bool) if turn.route_valid is None else turn.route_valid for turn, _ in pieces
    ]
    return np.concatenate([valid[rows] for valid, (_, rows) in zip(full, pieces, strict=True)])


def _join_spans(turns: list[MergedTrace], bounds: list[tuple[int, int]]) -> list[WeightSpan]:
    joined: list[WeightSpan] = []
    for turn, (start, end) in zip(turns, bounds, strict=True):
        for span in clip_spans(turn.weight_versions, start, end):
            if joined and joined[-1].version == span.version:
                span = joined.pop()._replace(row_end=span.row_end)
            joined.append(span)
    return joined
