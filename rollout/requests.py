"""From a user's call to checked requests. Everything that can be refused is refused here, before anything starts."""

from __future__ import annotations

import json
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollout.backend import ModelInfo, SampleRequest, Start
from rollout.sampling import SamplingParams
from rollout.start import ResumedCall, check_resumable, params_of
from storage.trace import Trace

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""Text, token ids, or the messages of a conversation, which the tokenizer's chat template makes token ids."""


@dataclass(frozen=True)
class CheckedCall:
    """Arguments of one call, checked; a step and a number within it make them requests."""

    run: str
    num_samples: int
    prompt_ids: list[tuple[int, ...]]
    sampling_params: list[SamplingParams]
    prompt_keys: list[str] | None
    metadata: list[dict[str, Any]]
    bad_word_ids: list[tuple[tuple[int, ...], ...]]
    starts: list[Start | None]
    route_starts: list[int]

    def requests(self, step: int, call: int) -> list[SampleRequest]:
        """In prompt order, the samples of one prompt side by side."""
        keys = self.prompt_keys or [f"{call}-{index}" for index in range(len(self.prompt_ids))]
        columns = (
            self.prompt_ids,
            self.sampling_params,
            self.metadata,
            self.bad_word_ids,
            self.starts,
            self.route_starts,
        )
        return [
            SampleRequest(
                f"{self.run}/{step}/{key}/{j}",
                step,
                ids,
                own,
                deepcopy(given),
                bad_words,
                start=start,
                routed_experts_start_len=route_start,
            )
            for key, ids, own, given, bad_words, start, route_start in zip(keys, *columns, strict=True)
            for j in range(self.num_samples)
        ]


@dataclass(frozen=True)
class RequestBuilder:
    """Checks prompts against one model and names samples `run/step/prompt_key/j`.

    Args:
        load_tokenizer: called once, when a prompt is a string or a stop string is given.
    """

    info: ModelInfo
    run: str
    load_tokenizer: Callable[[], Any]

    def check(
        self,
        prompts: Sequence[Prompt],
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_keys: Sequence[str] | None = None,
        metadata: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        routed_experts_start_len: int | Sequence[int] = 0,
        starts: Sequence[Start | None] | None = None,
    ) -> CheckedCall:
        """Everything of a call but its step. `starts`: what of each prompt was computed before.

        Raises:
            ValueError, TypeError: naming the index of the prompt that does not fit, and why.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts:
            raise TypeError(f"prompts must be a non-empty list of strings or token id lists, got {prompts!r:.80}")
        if not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"num_samples is {num_samples!r}, need an integer of at least 1")
        count = len(prompts)
        params = _per_prompt(
            "sampling_params", SamplingParams() if sampling_params is None else sampling_params, count, SamplingParams
        )
        facts = _per_prompt("metadata", {} if metadata is None else metadata, count, dict)
        keys = None if prompt_keys is None else _checked_keys(prompt_keys, count)
        ids = [self._prompt_ids(index, prompt) for index, prompt in enumerate(prompts)]
        for index in range(count):
            self._check(index, ids[index], params[index])
            _check_json(index, facts[index])
        bad_words = [self._bad_word_ids(index, params[index]) for index in range(count)]
        drawn = {"seed": secrets.randbits(62)}  # here, not in an engine: a retry elsewhere continues the same stream
        seeded = [p if p.seed is not None else p.model_copy(update=drawn) for p in params]
        route_starts = _per_prompt("routed_experts_start_len", routed_experts_start_len, count, int)
        for index, route_start in enumerate(route_starts):
            _check_route_start(index, route_start, len(ids[index]))
            self.info.capabilities.check_start(route_start, f"prompt {index}")
        given: list[Start | None] = [None] * count if starts is None else list(starts)
        return CheckedCall(self.run, num_samples, ids, seeded, keys, facts, bad_words, given, route_starts)

    def check_resume(
        self, traces: Sequence[Trace], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> ResumedCall:
        """Recorded traces to go on with, each under its own parameters unless others are given.

        Raises:
            ValueError, TypeError: naming the index and the sample that cannot be continued exactly, and why.
        """
        if isinstance(traces, Trace) or not isinstance(traces, Sequence) or not traces:
            raise TypeError(f"resume must be a non-empty list of traces, got {traces!r:.80}")
        for index, trace in enumerate(traces):
            check_resumable(index, trace, self.info)
        given: list[SamplingParams | None] = [None] * len(traces)
        if sampling_params is not None:
            given = _per_prompt("sampling_params", sampling_params, len(traces), SamplingParams)
        params = [params_of(index, trace, own) for index, (trace, own) in enumerate(zip(traces, given, strict=True))]
        for index, trace in enumerate(traces):
            self._check(index, tuple(trace.prompt_ids), params[index])
        drawn = {"seed": secrets.randbits(62)}
        seeded = [p if p.seed is not None else p.model_copy(update=drawn) for p in params]
        return ResumedCall(self.run, list(traces), seeded, [self._bad_word_ids(i, p) for i, p in enumerate(params)])

    def tokenize(self, text: str) -> list[int]:
        """Text in the middle of a sequence: no special tokens."""
        return list(self._tokenizer(0)(text, add_special_tokens=False)["input_ids"])

    def _prompt_ids(self, index: int, prompt: Prompt) -> tuple[int, ...]:
        try:
            if isinstance(prompt, (bytes, bytearray)):
                raise TypeError("bytes are neither text nor token ids")
            return tuple(operator.index(token) for token in self._tokenized(index, prompt))
        except TypeError as error:
            raise TypeError(
                f"prompt {index} is {prompt!r:.80}, need a string or a list of token ids or of messages"
            ) from error

    def _tokenized(self, index: int, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._tokenizer(index)(prompt)["input_ids"]
        if isinstance(prompt, Sequence) and prompt and all(isinstance(message, dict) for message in prompt):
            return self._from_messages(index, prompt)
        return prompt

    def _from_messages(self, index: int, messages: Sequence[dict[str, Any]]) -> Sequence[int]:
        tokenizer = self._tokenizer(index)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"prompt {index} is a list of messages and this checkpoint's tokenizer has no chat template; "
                "pass text or token ids, or save the tokenizer with a chat_template"
            )
        try:
            return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except Exception as error:  # templates are programs of the checkpoint and raise what they like
            raise ValueError(f"prompt {index}: the chat template refused {messages!r:.80}: {error}") from error

    def _bad_word_ids(self, index: int, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        return tuple(
            ids
            for word in params.bad_words
            for ids in (_spellings(self._tokenizer(index), word) if isinstance(word, str) else (word,))
        )

    def _tokenizer(self, index: int) -> Any:
        if self.info.tokenizer_path is None:
            raise ValueError(
                f"prompt {index} needs a tokenizer and this checkpoint ships none; pass token ids and stop_token_ids"
            )
        return self._loaded_tokenizer

    @cached_property
    def _loaded_tokenizer(self) -> Any:
        return self.load_tokenizer()

    def _check(self, index: int, ids: tuple[int, ...], params: SamplingParams) -> None:
        if not ids:
            raise ValueError(f"prompt {index} is empty; it needs at least one token")
        for what, tokens in (("prompt", ids), *_named_tokens(params)):
            wrong = [token for token in tokens if not 0 <= token < self.info.vocab_size]
            if wrong:
                raise ValueError(
                    f"{what} {index} has token id {wrong[0]}, outside the vocabulary [0, {self.info.vocab_size})"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.info.vocab_size:
                raise ValueError(
                    f"{name} of prompt {index} is {getattr(params, name)}, the vocabulary has {self.info.vocab_size}"
                )
        self.info.capabilities.check(params, f"prompt {index}")
        total = len(ids) + params.max_tokens
        if total > self.info.max_sequence_tokens:
            raise ValueError(
                f"prompt {index}: {len(ids)} prompt tokens + max_tokens {params.max_tokens} = {total} exceed "
                f"{self.info.max_sequence_tokens} ({self.info.max_sequence_reason}); "
                "shorten the prompt or lower max_tokens"
            )
        if params.stop:
            self._tokenizer(index)


def _named_tokens(params: SamplingParams) -> Iterator[tuple[str, Iterable[int]]]:
    """Token ids in sampling parameters, by the name under which an error reports them."""
    yield "stop_token_ids of prompt", params.stop_token_ids
    yield "allowed_token_ids of prompt", params.allowed_token_ids or ()
    yield "logit_bias of prompt", params.logit_bias
    for word in params.bad_words:
        if not isinstance(word, str):
            yield "bad_words of prompt", word


def _spellings(tokenizer: Any, word: str) -> Iterator[tuple[int, ...]]:
    """Token ids of a bad word, and with a space before it when that is another first token, as in vLLM."""
    bare, spaced = (tuple(tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False)) for space in ("", " "))
    yield bare
    if len(spaced) == len(bare) and spaced[0] != bare[0]:
        yield spaced


def _check_route_start(index: int, route_start: int, prompt_len: int) -> None:
    if not 0 <= route_start < prompt_len:
        raise ValueError(
            f"routed_experts_start_len of prompt {index} is {route_start}, need [0, {prompt_len}): as many rows as an "
            "earlier turn delivered"
        )


def _check_json(index: int, metadata: dict[str, Any]) -> None:
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata of prompt {index} is {metadata!r:.80}, need JSON values: {error}") from error


def _checked_keys(prompt_keys: Sequence[str], count: int) -> list[str]:
    keys = [str(key) for key in prompt_keys]
    if len(keys) != count or len(set(keys)) != count:
        raise ValueError(
            f"prompt_keys must be {count} different strings, one per prompt, got {len(set(keys))} different"
        )
    for key in keys:
        if not key or "/" in key or not key.isprintable():
            raise ValueError(f"prompt key {key!r} is empty, has a '/' or unprintable characters; it names the sample")
    return keys


def _per_prompt(name: str, given: Any, count: int, kind: type) -> list[Any]:
    """One value for all prompts, or a list of one per prompt."""
    values = [given] * count if isinstance(given, kind) else list(given) if isinstance(given, Sequence) else []
    if len(values) != count or not all(isinstance(value, kind) for value in values):
        raise ValueError(f"{name} must be one {kind.__name__} or a list of {count}, one per prompt, got {given!r:.80}")
    return values
