"""What the client asks of whatever generates: one small protocol, implemented in process and over Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rollout.sampling import SamplingParams
from storage.trace import RoutingSpec, Trace


@dataclass(frozen=True)
class SampleRequest:
    """One sequence to sample. Plain and picklable; seed and `sample_id` alone decide which random numbers it draws.

    `metadata` (JSON values) travels into the trace untouched: an expected answer, a task name. `bad_word_ids` are the
    bad words of the sampling parameters as token ids. `routes` `[rows, sites, K]`: rows from the first token on, which
    the forward must choose again.

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
    routes: np.ndarray | None = field(default=None, compare=False)

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
    """

    spec: RoutingSpec
    vocab_size: int
    max_sequence_tokens: int
    max_sequence_reason: str
    tokenizer_path: str | None
    captures_routes: bool
    trust_remote_code: bool = False


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

    def update_weights(self, source: Any, version: int) -> None:
        """Replace the weights of an idle backend; refused whole when names or shapes do not fit."""

    def close(self) -> None:
        """Stop, free the model; running streams end with finish_reason "abort"."""


class Recorder(Protocol):
    """Where finished traces go. A step is staged by `write` and appears at once with `commit`."""

    def committed_steps(self) -> list[int]:
        """Steps that readers can see, ascending."""

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
