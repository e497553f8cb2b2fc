"""One sequence under way, from its submission to its end: plain integers and lists."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from rollout.backend import SampleRequest
from rollout.request_logprobs import RequestLogprobs
from rollout.request_routes import RequestRoutes
from rollout.stops import StopChecker
from storage.trace import FinishReason, WeightSpan, expected_rows


@dataclass(eq=False)
class Request:
    """`computed` and `sampled` count what was launched, `output_ids` what came back.

    Attributes:
        known: tokens whose ids are on the host since it was admitted: the prompt, and what it had sampled before it
            yielded. They are computed in chunks; every later token is a decode.
        frozen: rows it had when it was admitted. The forward must choose these experts again.
        in_flight: steps launched and not processed.
        ready: tokens that steps before the one being scheduled compute.
        confirmed: tokens whose steps were processed, of those in its slots.
        leader: the running request whose prefix it copied; if a step of that one fails, so does this one.
        source: the routes of a prefix that it copied and has no rows of yet.
        epoch: how many updates of the weights there had been when it was first admitted.
        yielded: it had slots, and gave them up to an older request.
        began, seconds: when its first forward was launched, by `time.perf_counter()`, and how long it then ran.
    """

    request: SampleRequest
    stop: StopChecker
    random_key: int
    routes: RequestRoutes | None
    weight_version: int = 0
    arrival: int = -1
    wanted: RequestLogprobs | None = None
    row: int = -1
    slot: int = -1
    capacity: int = 0
    known: int = 0
    frozen: int = 0
    computed: int = 0
    sampled: int = 0
    in_flight: int = 0
    ready: int = 0
    confirmed: int = 0
    leader: Request | None = None
    source: RequestRoutes | None = None
    epoch: int | None = None
    yielded: bool = False
    began: float | None = None
    seconds: float | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    _versions: list[tuple[int, int]] = field(default_factory=list)
    _rows_launched: int = 0

    def __post_init__(self) -> None:
        self.known = self.prompt_len

    @property
    def prompt_len(self) -> int:
        """P, tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def asks_more(self) -> bool:
        """Its draws need more than temperature, top_p, top_k and min_p: logit edits or optional logprobs."""
        return self.wanted is not None or self.request.edits_logits

    @property
    def max_tokens(self) -> int:
        """Completion tokens at most."""
        return self.request.sampling_params.max_tokens

    @property
    def max_rows(self) -> int:
        """Tokens that can ever be an input: the last sampled one never is."""
        return self.prompt_len + max(self.max_tokens - 1, 0)

    @property
    def prefilling(self) -> bool:
        """Part of the known tokens was not launched yet."""
        return self.computed < self.known

    def restore(self) -> None:
        """Take over what was computed before it was submitted."""
        start = self.request.start
        if start is None:
            return
        if self.routes is not None:
            self.routes.extend(0, start.routed_experts)
        self.output_ids, self.logprobs = list(start.completion_ids), list(start.logprobs)
        self.raw_logprobs = list(start.raw_logprobs)
        if self.wanted is not None and start.top is not None:
            for at in range(len(self.output_ids)):
                self.wanted.set_completion(at, tuple(values[at] for values in start.top))
        if self.output_ids:
            self.stop(self.output_ids)  # what was read is not searched again
        if start.weight_versions:
            self._versions = [(span.version, span.row_start) for span in start.weight_versions]
            self._rows_launched = len(start.routed_experts)

    def tokens(self, start: int, end: int) -> list[int]:
        """Known token ids `[start, end)`."""
        prompt = self.request.prompt_ids
        if end <= len(prompt):
            return list(prompt[start:end])
        return [*prompt[start:], *self.output_ids[max(start - len(prompt), 0) : end - len(prompt)]]

    def begin(self) -> None:
        """Before it is admitted: all that it sampled is known, all rows that it has are frozen."""
        self.known = self.prompt_len + len(self.output_ids)
        self.sampled = len(self.output_ids)
        self.frozen = 0 if self.routes is None else self.routes.filled
        self.ready = self.confirmed = 0
        self.leader = self.source = None

    def take_over(self, length: int, routes: RequestRoutes | None, leader: Request | None) -> None:
        """The first tokens are computed: they were copied from where another request had them."""
        self.computed = self.ready = self.confirmed = length
        self.leader = leader
        self.source = routes if length > self.frozen else None

    def is_of(self, version: int) -> bool:
        """Whether all rows that it brought along are of this weight version."""
        start = self.request.start
        return start is None or {span.version for span in start.weight_versions} == {version}

    def launched(self, end: int, version: int, now: float) -> None:
        """Note that rows up to `end` were launched. Rows computed again keep the version of their first time."""
        if self.began is None:
            self.began = now
        if end <= self._rows_launched:
            return
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, self._rows_launched))
        self._rows_launched = end

    def weight_spans(self) -> list[WeightSpan]:
        """The versions of the rows that its trace has."""
        rows = expected_rows(self.prompt_len, len(self.output_ids), self.finish_reason or "abort")
        bounds = pairwise([*self._versions, (0, rows)])
        spans = [WeightSpan(version, start, min(end, rows)) for (version, start), (_, end) in bounds]
        return [span for span in spans if span.row_start < span.row_end]
