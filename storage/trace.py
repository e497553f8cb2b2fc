"""The route contract: what one finished sequence is, and which experts chose its path.

`routed_experts[i]` is the routing of token i *when token i was the model's input*; token i + 1 was sampled
from that forward. A sequence of T tokens therefore has T - 1 rows: the last sampled token was never an input.
Ids are logical, in the order the router returned them, never sorted. Missing rows are absent, never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np

from storage.spec import RoutingSpec as RoutingSpec
from storage.spec import Site as Site

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
OPTIONAL_LOGPROBS = {
    "top_ids": np.int32,
    "top_logprobs": np.float32,
    "raw_top_logprobs": np.float32,
    "prompt_logprobs": np.float32,
    "raw_prompt_logprobs": np.float32,
    "prompt_top_ids": np.int32,
    "prompt_top_logprobs": np.float32,
    "raw_prompt_top_logprobs": np.float32,
}
"""Fields of a Trace that hold logprobs a caller asked for, and their dtypes."""


class WeightSpan(NamedTuple):
    """Rows `[row_start, row_end)` were computed with this weight version."""

    version: int
    row_start: int
    row_end: int


def _same(left: Any, right: Any) -> bool:
    arrays = isinstance(left, np.ndarray) or isinstance(right, np.ndarray)
    return np.array_equal(left, right) if arrays else left == right


def expected_rows(prompt_len: int, completion_len: int, finish_reason: str) -> int:
    """Rows of a full trace: T - 1 with a token delivered, all P when prompt-only, none when aborted at once.

    >>> expected_rows(5, 3, "stop"), expected_rows(5, 0, "length"), expected_rows(5, 0, "abort")
    (7, 5, 0)
    """
    if completion_len:
        return prompt_len + completion_len - 1
    return prompt_len if finish_reason in ("length", "stop") else 0


def _int_list(tokens: Any) -> list[int]:
    """Plain integers, whatever sequence they come in."""
    return np.asarray(tokens, np.int64).tolist() if len(tokens) else []


@dataclass
class Trace:
    """One finished sequence.

    >>> ids = np.zeros((3, 1, 2), np.uint8)
    >>> t = Trace(sample_id="run/0/0-0/0", step=0, prompt_ids=[5, 7], completion_ids=[9, 2],
    ...           logprobs=[-0.1, -0.2], routed_experts=ids, finish_reason="stop", weight_version=0)
    >>> t.token_ids, t.num_rows, t.group_id
    ([5, 7, 9, 2], 3, 'run/0/0-0')

    Attributes:
        sample_id: `run/step/prompt_key/j`, never an attempt or an actor, so that a retry is recognisable.
        step: the unit that is committed at once.
        prompt_ids, completion_ids: token ids; a stop token is included, as in vLLM.
        logprobs: float32, one per completion token, under the distribution it was sampled from (after
            temperature, top-k, top-p, min-p; at temperature 0 the raw log-softmax).
        routed_experts: integers `[route_len, sites, K]`, or None when not captured.
        finish_reason: "stop", "length", "abort" or "error"; a trace with "error" is never committed.
        weight_version: shorthand for one span over all rows; give `weight_versions` instead for several.
        group_id: the prompt's id, shared by its samples. Default: sample_id without its last part.
        raw_logprobs: float32, the model's own log-softmax of each completion token.
        route_start: position of the first row.
        route_valid: None or one bool per row; a False row is zeros that nobody reads.
        stop_reason: the stop token id or stop string that ended it, if one did.
        error: what went wrong when finish_reason is "error".
        model: None, or the fingerprint of config and tokenizer of the model that sampled it.
        gate_weights: None, or float16 like routed_experts: the weight that each chosen expert got.
        seconds: None, or how long it ran, from the launch of its first forward on; from its request on where a served
            engine ran it. No part of what was sampled: traces that differ in it alone are equal.
        top_ids, top_logprobs, raw_top_logprobs: None, or `[completion, n]`: the model's n most likely tokens (int32)
            where each completion token was sampled, most likely first, and their log-probabilities (float32) under
            the distribution sampled from (-inf when filtered out) and under the model's own.
        prompt_logprobs, raw_prompt_logprobs: None, or float32 `[P - 1]`: of `prompt_ids[1:]`.
        prompt_top_ids, prompt_top_logprobs, raw_prompt_top_logprobs: None, or `[P - 1, n]`, likewise.

    Raises:
        ValueError: naming the sample when lengths, rows or spans contradict each other.
    """

    sample_id: str
    step: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: np.ndarray
    routed_experts: np.ndarray | None
    finish_reason: FinishReason
    weight_version: int = 0
    group_id: str = ""
    raw_logprobs: np.ndarray | None = None
    route_start: int = 0
    route_valid: np.ndarray | None = None
    weight_versions: Sequence[WeightSpan] = ()
    stop_reason: int | str | None = None
    seed: int | None = None
    sampling_params: dict[str, Any] = field(default_factory=dict)
    text: str | None = None
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    raw_top_logprobs: np.ndarray | None = None
    prompt_logprobs: np.ndarray | None = None
    raw_prompt_logprobs: np.ndarray | None = None
    prompt_top_ids: np.ndarray | None = None
    prompt_top_logprobs: np.ndarray | None = None
    raw_prompt_top_logprobs: np.ndarray | None = None
    model: str | None = None
    gate_weights: np.ndarray | None = None
    seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.prompt_ids = _int_list(self.prompt_ids)
        self.completion_ids = _int_list(self.completion_ids)
        self.logprobs = np.asarray(self.logprobs, np.float32)
        if self.raw_logprobs is not None:
            self.raw_logprobs = np.asarray(self.raw_logprobs, np.float32)
        if self.route_valid is not None:
            self.route_valid = np.asarray(self.route_valid, bool)
        if self.gate_weights is not None:
            self.gate_weights = np.asarray(self.gate_weights, np.float16)
        for name, dtype in OPTIONAL_LOGPROBS.items():
            if getattr(self, name) is not None:
                setattr(self, name, np.asarray(getattr(self, name), dtype))
        self.group_id = self.group_id or self.sample_id.rpartition("/")[0] or self.sample_id
        spans = [WeightSpan(*map(int, span)) for span in self.weight_versions]
        self.weight_versions = spans or [WeightSpan(int(self.weight_version), 0, self.num_rows)]
        self.weight_version = self.weight_versions[-1].version
        self.check()

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt_ids + self.completion_ids

    @property
    def num_rows(self) -> int:
        """Rows that a full trace of these tokens has, recorded or not."""
        return expected_rows(len(self.prompt_ids), len(self.completion_ids), self.finish_reason)

    @property
    def route_len(self) -> int:
        """Rows held: 0 when capture was off."""
        return 0 if self.routed_experts is None else len(self.routed_experts)

    @property
    def phase(self) -> np.ndarray:
        """`[route_len]`, "prefill" where a prompt token was the input, "decode" where a completion token was.

        >>> t.routed_experts[t.phase == "decode"]  # of the example: row 2, the input was token 9
        """
        positions = np.arange(self.route_start, self.route_start + self.route_len)
        return np.where(positions < len(self.prompt_ids), "prefill", "decode")

    def __eq__(self, other: object) -> bool:
        """Equal in every field but `seconds`; arrays by shape and value."""
        if not isinstance(other, Trace):
            return NotImplemented
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.compare)

    def _fail(self, message: str) -> None:
        raise ValueError(f"trace {self.sample_id!r}: {message}")

    def check(self) -> None:
        """Raise ValueError, naming the sample, when fields contradict each other."""
        if not self.sample_id:
            raise ValueError("a trace needs a sample_id such as 'run/0/0-0/0'")
        if self.finish_reason not in FINISH_REASONS:
            self._fail(f"finish_reason {self.finish_reason!r}, need one of {FINISH_REASONS}")
        for name in ("logprobs", "raw_logprobs"):
            values = getattr(self, name)
            if values is not None and values.shape != (len(self.completion_ids),):
                self._fail(f"{name} has shape {values.shape} for {len(self.completion_ids)} completion tokens")
        self._check_optional_logprobs("", len(self.completion_ids))
        self._check_optional_logprobs("prompt_", len(self.prompt_ids) - 1)
        self._check_rows()
        self._check_spans()

    def _check_optional_logprobs(self, kind: str, rows: int) -> None:
        names = f"{kind}top_ids", f"{kind}top_logprobs", f"raw_{kind}top_logprobs"
        top = [getattr(self, name) for name in names]
        if any(values is not None for values in top):
            shapes = [None if values is None else values.shape for values in top]
            if len(set(shapes)) > 1 or top[0].ndim != 2 or len(top[0]) != rows:
                self._fail(f"{', '.join(names)} have shapes {shapes}, need three times [{rows}, n]")
        for name in ("prompt_logprobs", "raw_prompt_logprobs") if kind else ():
            values = getattr(self, name)
            if values is not None and values.shape != (rows,):
                self._fail(f"{name} has shape {values.shape} for {rows + 1} prompt tokens, the first has none")

    def _check_rows(self) -> None:
        shape = None if self.routed_experts is None else np.asarray(self.routed_experts).shape
        if self.gate_weights is not None and self.gate_weights.shape != shape:
            self._fail(f"gate_weights has shape {self.gate_weights.shape}, need that of routed_experts, {shape}")
        if self.routed_experts is None:
            if self.route_valid is not None or self.route_start:
                self._fail("has route_valid or route_start but no routed_experts")
            return
        self.routed_experts = np.asarray(self.routed_experts)
        if self.routed_experts.ndim != 3 or self.routed_experts.dtype.kind not in "iu":
            self._fail(
                f"routed_experts is {self.routed_experts.dtype} of shape {self.routed_experts.shape}, "
                "need integers [rows, sites, K]"
            )
        end = self.route_start + self.route_len
        if self.route_start < 0 or end != self.num_rows:
            self._fail(
                f"rows {self.route_start}..{end} for {len(self.token_ids)} tokens; the rows must end at "
                f"{self.num_rows} (the last sampled token was never an input)"
            )
        if self.route_valid is None:
            return
        if self.route_valid.shape != (self.route_len,):
            self._fail(f"route_valid has shape {self.route_valid.shape} for {self.route_len} rows")
        if self.routed_experts[~self.route_valid].any():
            self._fail("a row that route_valid calls invalid is not zero")

    def _check_spans(self) -> None:
        row = 0
        for span in self.weight_versions:
            if span.row_start != row or span.row_end < span.row_start:
                self._fail(f"weight_versions {list(self.weight_versions)} do not cover the rows in order")
            row = span.row_end
        if row != self.num_rows:
            self._fail(f"weight_versions end at row {row}, need {self.num_rows}")
