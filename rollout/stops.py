"""When a sequence ends: stop tokens, stop strings, length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.sampling import SamplingParams
from storage.trace import FinishReason

PARTIAL = "\N{REPLACEMENT CHARACTER}"  # decoders put it for bytes that do not make a character yet


class StopChecker:
    """Looks at one request's completion after each token.

    >>> check = StopChecker(SamplingParams(max_tokens=2), eos_token_ids=(1,), tokenizer=None)
    >>> check([7]), check([7, 1])
    (None, ('stop', None))

    As in vLLM, `stop_reason` is None for the model's own end token and the id or string for one the caller named.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], tokenizer: Any) -> None:
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._named = frozenset(params.stop_token_ids)
        self._text = _TextTail(tokenizer, max(map(len, params.stop), default=0)) if params.stop else None

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Ids that end this sequence, and that may not be drawn before `min_tokens`."""
        return self._eos | self._named

    def __call__(self, completion: Sequence[int]) -> tuple[FinishReason, int | str | None] | None:
        """None to go on, else (finish_reason, stop_reason)."""
        token = completion[-1]
        found = self._find_stop_string(completion)
        if len(completion) >= self._params.min_tokens:
            if token in self._eos:
                return "stop", None
            if token in self._named:
                return "stop", token
            if found is not None:
                return "stop", found
        return ("length", None) if len(completion) >= self._params.max_tokens else None

    def _find_stop_string(self, completion: Sequence[int]) -> str | None:
        if self._text is None:
            return None
        window, known = self._text.extend(completion)
        hits = [(window.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._params.stop]
        return min((hit for hit in hits if hit[0] >= 0), default=(0, None))[1]


class _TextTail:
    """The end of the text so far, long enough to hold any stop string that the newest token completes.

    Decoding restarts some tokens before the newest, so that tokens which only make sense together (bytes of one
    character, a leading space) decode as they do in the whole text.
    """

    def __init__(self, tokenizer: Any, longest_stop: int) -> None:
        self._tokenizer = tokenizer
        self._keep = longest_stop - 1
        self._tail = ""
        self._prefix = self._read = self._searched = 0

    def extend(self, completion: Sequence[int]) -> tuple[str, int]:
        """(tail and new text, how many of its characters were returned before); the start of a character waits."""
        before = self._decode(completion[self._prefix : self._read])
        now = self._decode(completion[self._prefix :])
        new = now[len(before) :].rstrip(PARTIAL)
        kept = self._tail[-self._keep :] if self._keep else ""
        text, known = kept + new, len(kept) + self._searched
        if now.endswith(PARTIAL):
            self._searched = len(new)
        else:
            self._tail, self._searched = text, 0
            self._prefix, self._read = self._read, len(completion)
        return text, known

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False) if tokens else ""


def completion_text(tokenizer: Any, ids: Sequence[int], stop_reason: int | str | None) -> str | None:
    """The text of a completion, cut at the stop string that ended it; None without a tokenizer."""
    if tokenizer is None:
        return None
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True)
    if not isinstance(stop_reason, str):
        return text
    before = tokenizer.decode(list(ids[:-1]), skip_special_tokens=True)
    return cut_at_stop(text, stop_reason, len(before.rstrip(PARTIAL)))


def cut_at_stop(text: str, stop: str, known: int) -> str:
    """`text` up to the stop string that its last token completed; the first `known` characters came before that token.

    >>> cut_at_stop("1;23;", ";", known=4)
    '1;23'
    """
    start = text.find(stop, max(0, known - len(stop) + 1))
    return text if start < 0 else text[:start]
