"""What the client asks of whatever generates: one small protocol, implemented in process and over Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import numpy as np
import pyarrow as pa

from rollout.capabilities import Capabilities
from rollout.figures import Figures
from rollout.sampling import SamplingParams
from rollout.update_modes import InFlight, KVMode
from storage.trace import RoutingSpec, Trace, WeightSpan

PauseMode = Literal["keep", "wait", "abort", "yield"]


def check_pause_mode(mode: str) -> None:
    """ValueError for a mode that does not exist."""
    if mode not in get_args(PauseMode):
        raise ValueError(f"pause mode {mode!r}, need one of {get_args(PauseMode)}")


def known_samples(sample_ids: Sequence[str] | Literal["all"], known: set[str]) -> set[str]:
    """The named ones; ValueError when one of them is not among the known."""
    if sample_ids == "all":
        return known
    if isinstance(sample_ids, str):
        raise ValueError(f"abort({sample_ids!r}): pass a list of sample ids, or 'all'")
    unknown = sorted(set(sample_ids) - known)
    if unknown:
        raise ValueError(f"abort of {unknown[:3]}: no such samples wait or run, they may have ended; none was aborted")
    return set(sample_ids)


@dataclass(frozen=True)
class Start:
    """What of a sequence was computed before, by this engine or another: the first rows, and sampled tokens.

    Attributes:
        routed_experts: `[rows, sites, K]` from position 0 on; recomputation repeats them.
        weight_versions: spans over these rows; without any, rows count as computed now.
        completion_ids, logprobs, raw_logprobs: sampled tokens behind the prompt; `rows` is then `P + k - 1`.
        top: `top_ids`, `top_logprobs` and `raw_top_logprobs` of these tokens, if they are wanted; see Trace.
    """

    routed_experts: np.ndarray
    weight_versions: tuple[WeightSpan, ...] = ()
    completion_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    top: tuple[np.ndarray, ...] | None = None


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample. Plain and picklable; seed and `sample_id` alone decide which random numbers it draws.

    `metadata` (JSON values) travels into the trace untouched: an expected answer, a task name. `bad_word_ids` are the
    bad words of the sampling parameters as token ids. `start` is what was computed before. The trace has the rows from
    `routed_experts_start_len` on. `stream_id` names the sample whose random numbers it draws, when not its own.

    Raises:
        ValueError: without a seed; drawn in an engine, a retry on another would not continue the same stream.

    >>> SampleRequest("run/0/0-0/1", step=0, prompt_ids=(5, 7), sampling_params=SamplingParams(seed=0))
    """

    sample_id: str
    step: int
    prompt_ids: tuple[int, ...]
    sampling_params: SamplingParams
    metadata: dict[str, Any] = field(default_factory=dict)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    group_id: str = ""
    stream_id: str = ""
    start: Start | None = field(default=None, compare=False)
    routed_experts_start_len: int = 0

    def __post_init__(self) -> None:
        if self.sampling_params.seed is None:
            raise ValueError(f"request {self.sample_id} has no seed; RolloutClient draws one per call")

    @cached_property
    def edits_logits(self) -> bool:
        """Whether anything but temperature, min_p, top_k and top_p can change its logits."""
        p = self.sampling_params
        return bool(p.penalised or p.logit_bias or p.min_tokens or p.allowed_token_ids is not None or self.bad_word_ids)

    @property
    def seed(self) -> int:
        """The seed of its random numbers."""
        assert self.sampling_params.seed is not None
        return self.sampling_params.seed


@dataclass(frozen=True)
class ModelInfo:
    """What the client needs to know of the model to check a request before anything starts.

    `max_sequence_tokens` is the longest prompt + completion that both the model's positions and the KV pool hold.
    `not_forced` says why its routers cannot be forced; empty when they can. `fingerprint` is of config and tokenizer:
    traces of another one are not continued.
    """

    spec: RoutingSpec
    vocab_size: int
    max_sequence_tokens: int
    max_sequence_reason: str
    tokenizer_path: str | None
    captures_routes: bool
    not_forced: str = ""
    fingerprint: str | None = None
    trust_remote_code: bool = False
    capabilities: Capabilities = field(default_factory=Capabilities)


class Finished(Protocol):
    """Some finished traces: in memory for a local engine, in the object store for Ray."""

    def traces(self) -> list[Trace]:
        """The traces; fetched and decoded on first use."""

    def table(self) -> pa.Table:
        """The same as Arrow, in the dataset's schema."""

    @property
    def ref(self) -> Any:
        """The Ray reference of the table, None when it is local."""


class FinishedStream(Protocol):
    """An iterator that can be left early."""

    def __iter__(self) -> Iterator[Finished]:
        """Itself."""

    def __next__(self) -> Finished:
        """Wait for the next finished traces."""

    def close(self) -> None:
        """Abort what is still being sampled; for the thread that iterates."""

    def abort(self) -> None:
        """End it from another thread: the iterator soon ends, with or without aborted traces."""


class Backend(Protocol):
    """A generator of traces. Several threads may stream from one backend at once."""

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""

    @property
    def has_refs(self) -> bool:
        """Whether `Finished.ref` is a Ray reference."""

    def stream(self, requests: Sequence[SampleRequest]) -> FinishedStream:
        """Traces as they finish, each request once, in any order. Closing the stream aborts the rest."""

    def figures(self) -> Figures:
        """Counts and state, under the names of rollout/figures.py; cheap, for any thread."""

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling, and return when no forward is under way. Requests that come now wait for `resume`.

        keep: running requests stay where they are. wait: those that have begun end first. abort: all end now, with
        what they have. yield: they give up their keys and values, and recompute them under replay afterwards.
        """

    def resume(self) -> None:
        """Go on."""

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """End samples that wait or run; their traces come with finish_reason "abort" and what they have.

        Raises:
            ValueError: one of them is not known, or has ended; nothing is aborted.
        """

    def update_weights(
        self,
        source: Any,
        version: int,
        *,
        force: bool = False,
        in_flight: InFlight = "wait",
        kv: KVMode = "keep",
        check_finite: bool = False,
    ) -> None:
        """See `RolloutClient.update_weights`; refused whole when names or shapes do not fit."""

    def prepare_update(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False
    ) -> AbstractContextManager[Callable[[InFlight, KVMode], None]]:
        """An update in two halves, for a pool: entering checks it, calling the result with `in_flight` and `kv` applies
        it, leaving drops it."""

    def sleep(self, level: int = 1, *, in_flight: Literal["wait", "abort"] = "wait") -> None:
        """See `RolloutClient.sleep`."""

    def wake(
        self, source: Any = None, version: int | None = None, *, force: bool = False, check_finite: bool = False
    ) -> None:
        """See `RolloutClient.wake`."""

    def close(self) -> None:
        """Stop, free the model; running streams end with finish_reason "abort"."""


class Recorder(Protocol):
    """Where finished traces go. A step is staged by `write` and appears at once with `commit`."""

    def taken_steps(self) -> list[int]:
        """Steps that cannot be written, ascending: the committed ones and, of those that were dropped, the last."""

    def write(self, finished: Finished, step: int, rewards: dict[str, float] | None = None) -> None:
        """Stage traces of `step`, without those that ended in an error; `rewards` by sample_id fill the reward column.

        Thread-safe; may block (backpressure).
        """

    def commit(self, step: int) -> bool:
        """Make the staged traces of `step` visible, all at once; False when nothing was staged.

        Raises:
            StepExistsError: the step is committed already.
        """

    def abandon(self, step: int) -> None:
        """Drop what was staged for `step`."""

    def close(self) -> None:
        """Abandon all that was not committed and release the dataset."""
