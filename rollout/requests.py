"""From a user's call to checked requests. Everything that can be refused is refused here, before anything starts."""

from __future__ import annotations

import json
import operator
import secrets
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rollout.backend import ModelInfo, SampleRequest
from rollout.sampling import SamplingParams

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class CheckedCall:
    """Arguments of one call, checked; a step and a number within it make them requests."""

    run: str
    num_samples: int
    prompt_ids: list[tuple[int, ...]]
    sampling_params: list[SamplingParams]
    prompt_keys: list[str] | None
    metadata: list[dict[str, Any]]

    def requests(self, step: int, call: int) -> list[SampleRequest]:
        """In prompt order, the samples of one prompt side by side."""
        keys = self.prompt_keys or [f"{call}-{index}" for index in range(len(self.prompt_ids))]
        prompts = zip(keys, self.prompt_ids, self.sampling_params, self.metadata, strict=True)
        return [
            SampleRequest(f"{self.run}/{step}/{key}/{j}", step, ids, params, deepcopy(facts))
            for key, ids, params, facts in prompts
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
    ) -> CheckedCall:
        """Everything of a call but its step.

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
        drawn = {"seed": secrets.randbits(62)}  # here, not in an engine: a retry elsewhere continues the same stream
        seeded = [p if p.seed is not None else p.model_copy(update=drawn) for p in params]
        return CheckedCall(self.run, num_samples, ids, seeded, keys, facts)

    def _prompt_ids(self, index: int, prompt: Prompt) -> tuple[int, ...]:
        try:
            if isinstance(prompt, (bytes, bytearray)):
                raise TypeError("bytes are neither text nor token ids")
            ids = self._tokenizer(index)(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            return tuple(operator.index(token) for token in ids)
        except TypeError as error:
            raise TypeError(f"prompt {index} is {prompt!r:.80}, need a string or a list of token ids") from error

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
        for what, tokens in (("prompt", ids), ("stop_token_ids of prompt", params.stop_token_ids)):
            wrong = [token for token in tokens if not 0 <= token < self.info.vocab_size]
            if wrong:
                raise ValueError(
                    f"{what} {index} has token id {wrong[0]}, outside the vocabulary [0, {self.info.vocab_size})"
                )
        total = len(ids) + params.max_tokens
        if total > self.info.max_sequence_tokens:
            raise ValueError(
                f"prompt {index}: {len(ids)} prompt tokens + max_tokens {params.max_tokens} = {total} exceed "
                f"{self.info.max_sequence_tokens} ({self.info.max_sequence_reason}); "
                "shorten the prompt or lower max_tokens"
            )
        if params.stop:
            self._tokenizer(index)


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
