"""Conversations: each turn goes on from all tokens before it, with tool or user tokens between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from rollout.backend import Start
from rollout.sampling import SamplingParams
from storage.trace import Trace
from storage.turns import MergedTrace, merge_turns

SampleTurn = Callable[..., Trace]


class Session:
    """The turns of one conversation; made by `RolloutClient.session`.

    A turn's prompt is every token so far and the new ones, which are inputs with rows, without logprobs and outside of
    the loss. What was computed before keeps its experts: it is recomputed under replay, or found in the prefix cache.
    A turn's trace has the rows from where the turn before ended (`route_start`); its first row is that of the last
    sampled token, which becomes an input only now.

    >>> session = client.session(SamplingParams(max_tokens=8, seed=0))
    >>> first = session.sample([4, 5, 13, 6, 14])
    >>> second = session.sample([7, 9])          # what a tool answered
    >>> second.prompt_ids == [*first.token_ids, 7, 9], second.route_start == len(first.token_ids) - 1
    (True, True)
    >>> ReplayBatch.collate([session.merged()], spec=client.info.spec)
    """

    def __init__(self, sample: SampleTurn, tokenize: Callable[[str], Sequence[int]]) -> None:
        self.turns: list[Trace] = []
        self._turn = threading.Lock()
        self._sample = sample
        self._tokenize = tokenize

    def sample(
        self,
        tokens: str | Sequence[int],
        *,
        sampling_params: SamplingParams | None = None,
        step: int | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Trace:
        """One more turn. Text is tokenized on its own, without special tokens, behind the first turn's.

        A turn that failed, or was aborted before its first token, does not become a part of the conversation.

        Raises:
            ValueError: as `RolloutClient.sample`; naming prompt 0, which is the whole conversation.
            RuntimeError: another thread samples a turn of this conversation.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("a turn of this session is under way; wait for it, or use one session per conversation")
        try:
            return self._sample_turn(tokens, sampling_params, step, metadata)
        finally:
            self._turn.release()

    def _sample_turn(
        self,
        tokens: str | Sequence[int],
        sampling_params: SamplingParams | None,
        step: int | None,
        metadata: dict[str, Any] | None,
    ) -> Trace:
        start = self._start()
        if self.turns:
            new = self._tokenize(tokens) if isinstance(tokens, str) else tokens
            tokens = [*self.turns[-1].token_ids, *new]
        trace = self._sample(tokens, start, sampling_params, step, metadata)
        if trace.routed_experts is not None and trace.finish_reason != "error":
            self.turns.append(trace)
        return trace

    def merged(self) -> MergedTrace:
        """All turns as one sequence for `ReplayBatch.collate`; ValueError before the first turn."""
        return merge_turns(self.turns)

    def _start(self) -> Start | None:
        if not self.turns:
            return None
        merged = self.merged()
        return Start(merged.routed_experts, tuple(merged.weight_versions))
