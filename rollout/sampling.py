"""Sampling parameters in vLLM's spelling, checked when they are made. Imports no torch."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MIN_TEMPERATURE = 1e-5
Bias = Annotated[float, Field(allow_inf_nan=False)]
REMEDIES = {
    "n": "pass num_samples= to sample() instead",
    "best_of": "pass num_samples= to sample() and choose by reward",
    "max_new_tokens": "it is called max_tokens here, as in vLLM",
    "do_sample": "temperature=0 is greedy",
}


def readable(error: ValidationError) -> str:
    """All problems of a pydantic error in one line: `top_p: Input should be greater than 0, got 0.0`."""
    return "; ".join(_problem(item) for item in error.errors())


def _problem(item: Any) -> str:
    where = ".".join(map(str, item["loc"]))
    what = item["msg"].removeprefix("Value error, ")
    given = "" if item["type"] in ("missing", "value_error") else f", got {item['input']!r}"
    return f"{where}: {what}{given}" if where else what


class StrictModel(BaseModel):
    """Base of all configuration: immutable, unknown keys refused by name with a suggestion."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, values: Any) -> Any:
        for key in values if isinstance(values, dict) else ():
            if key not in cls.model_fields:
                close = difflib.get_close_matches(key, cls.model_fields, 1)
                hint = REMEDIES.get(key) or (
                    f"did you mean {close[0]!r}?" if close else f"known: {sorted(cls.model_fields)}"
                )
                raise ValueError(f"unknown {cls.__name__} key {key!r}: {hint}")
        return values


class SamplingParams(StrictModel):
    """How tokens are drawn and when a sequence ends.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, seed=0).top_k
    0

    The logits change in vLLM's order: allowed_token_ids, bad_words, stop tokens before min_tokens, logit_bias,
    repetition, frequency and presence penalty; these count for greedy draws too. Then temperature, min_p, top_k, top_p.

    `top_k` 0 or -1 keeps all tokens. `max_tokens` 0 computes the prompt only. Without a `seed` a random one is drawn
    per call and recorded in the trace. A `stop` string ends the sequence at the token that completes it; that token
    stays in `completion_ids`, `text` is cut.

    Attributes:
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in prompt or completion
            (Keskar et al. 2019, https://arxiv.org/abs/1909.05858).
        frequency_penalty, presence_penalty: subtracted per occurrence in the completion, and once if there is any.
        logit_bias: token id to what is added to its logit.
        bad_words: text, or token ids, that the completion never contains. A text is forbidden as its tokens with and
            without a space before it; the same text spelled with other tokens can still appear, as in vLLM.
        logprobs: also record the model's N most likely tokens at each completion token. The sampled token's
            own logprob is always recorded.
        prompt_logprobs: record the logprob of each prompt token after the first, and the N most likely tokens there.
    """

    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    max_tokens: int = Field(16, ge=0)
    min_tokens: int = Field(0, ge=0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = Field(1.0, gt=0.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[int, Bias] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logprobs: int | None = Field(None, ge=0)
    prompt_logprobs: int | None = Field(None, ge=0)

    def __hash__(self) -> int:
        """Of the fields; a dict has none of its own."""
        return hash(tuple(tuple(sorted(v.items())) if isinstance(v, dict) else v for _, v in self))

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits of later ones."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @field_validator("allowed_token_ids")
    @classmethod
    def _some_allowed(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and not value:
            raise ValueError("allowed_token_ids is empty, so nothing could be drawn; leave it out to allow all")
        return None if value is None else tuple(sorted(set(value)))

    @field_validator("bad_words")
    @classmethod
    def _no_empty_word(cls, value: tuple[str | tuple[int, ...], ...]) -> tuple[str | tuple[int, ...], ...]:
        for index, word in enumerate(value):
            if not (word.strip() if isinstance(word, str) else word):
                raise ValueError(f"bad word {index} is {word!r}, need text or token ids")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value or ())

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("temperature")
    @classmethod
    def _not_tiny(cls, value: float) -> float:
        if 0 < value < MIN_TEMPERATURE:
            raise ValueError(f"a temperature below {MIN_TEMPERATURE} overflows float32; 0 is greedy")
        return value

    @model_validator(mode="after")
    def _prompt_has_no_history(self) -> SamplingParams:
        if self.prompt_logprobs is not None and (self.penalised or self.bad_words):
            raise ValueError(
                "prompt_logprobs with penalties or bad_words: these depend on what was sampled before, which a "
                "prompt does not say; take the prompt's logprobs in a call of their own"
            )
        return self

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        return self
