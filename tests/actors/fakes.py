"""A backend without a model, for tests of what surrounds one: traces are a function of sample id and weight version."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollout.backend import ModelInfo, SampleRequest
from rollout.sampling import SamplingParams
from storage.schema import to_table
from storage.trace import RoutingSpec, Trace

SPEC = RoutingSpec.uniform(num_sites=2, num_experts=16, top_k=2)
COMPLETION = 4


def make_request(sample_id: str, *, milliseconds: int = 0) -> SampleRequest:
    """A request that takes the fake `milliseconds`; the step is the sample id's."""
    return SampleRequest(sample_id, int(sample_id.split("/")[1]), (5, milliseconds), SamplingParams(seed=0))


def make_requests(prompts: int, samples: int, *, step: int = 0, milliseconds: int = 0) -> list[SampleRequest]:
    return [
        make_request(f"run/{step}/{p}/{j}", milliseconds=milliseconds) for p in range(prompts) for j in range(samples)
    ]


def expected_trace(request: SampleRequest, version: int = 0, spec: RoutingSpec = SPEC) -> Trace:
    """What the fake answers: random numbers keyed by sample id and version alone."""
    rng = np.random.default_rng([zlib.crc32(request.sample_id.encode()), version])
    rows = len(request.prompt_ids) + COMPLETION - 1
    return Trace(
        sample_id=request.sample_id,
        step=request.step,
        prompt_ids=list(request.prompt_ids),
        completion_ids=rng.integers(0, 100, COMPLETION).tolist(),
        logprobs=-rng.random(COMPLETION, np.float32),
        routed_experts=rng.integers(0, 16, (rows, *spec.row_shape)).astype(np.uint8),
        finish_reason="length",
        weight_version=version,
        metadata={"pid": os.getpid()},
    )


@dataclass(frozen=True)
class InMemory:
    """Finished traces of this process; like the engine's, without importing torch."""

    items: list[Trace]
    spec: RoutingSpec = SPEC
    ref: None = None

    def traces(self) -> list[Trace]:
        return self.items

    def table(self) -> pa.Table:
        return to_table(self.items, self.spec)


class FakeBackend:
    """Samples one request of a stream after another.

    Options:
        journal: a folder; every started request leaves an empty file there, named after its sample.
        die_at, die_times: kill the process when it comes to this sample, as often as that (counted in the journal);
            "stage" and "apply" are the two halves of a weight update.
        stall_at, die_times: stand still at this sample, as often as that.
        fail_at: raise ValueError at this sample.  error_at: answer this sample with finish_reason "error".
        load_error: raise FileNotFoundError instead of loading.  load_seconds: how long loading takes.
    """

    has_refs = False

    def __init__(
        self,
        model: str,
        *,
        journal: str | None = None,
        die_at: str | None = None,
        die_times: int = 1,
        stall_at: str | None = None,
        fail_at: str | None = None,
        error_at: str | None = None,
        load_error: str | None = None,
        load_seconds: float = 0,
    ) -> None:
        if load_error:
            raise FileNotFoundError(load_error)
        time.sleep(load_seconds)
        self.info = ModelInfo(SPEC, 100, 4096, "the fake's own limit", None, True)
        self.version = 0
        self.asleep = 0
        self._journal = Path(journal) if journal else None
        self._die_at, self._die_times, self._fail_at, self._error_at = die_at, die_times, fail_at, error_at
        self._stall_at = stall_at
        self.progress = 0
        self._streams: list[FakeStream] = []

    def figures(self) -> dict[str, float]:
        return {"engines": 1, "tokens_sampled_total": self.progress, "weight_version": self.version}

    def stream(self, requests: Sequence[SampleRequest]) -> FakeStream:
        stream = FakeStream(self, requests)
        self._streams.append(stream)
        return stream

    def answer(self, request: SampleRequest, stopped: threading.Event) -> Trace:
        """What `request` ends in, after the time it takes or once `stopped`."""
        self._note("start", request.sample_id)
        if request.sample_id == self._stall_at and self._count("stall") < self._die_times:
            self._note("stall", f"{os.getpid()}")
            threading.Event().wait()
        self.progress += COMPLETION
        if request.sample_id == self._die_at and self._count("death") < self._die_times:
            self._note("death", f"{os.getpid()}")
            time.sleep(0.2)  # let what was yielded before reach the driver
            os._exit(1)
        if request.sample_id == self._fail_at:
            raise ValueError(f"sample {request.sample_id} hit a bad kernel")
        if request.sample_id == self._error_at:
            return empty_trace(request, "error", "no free slot")
        if stopped.wait(request.prompt_ids[1] / 1000):
            self._note("abort", request.sample_id)
            return empty_trace(request, "abort")
        return expected_trace(request, self.version)

    def update_weights(self, source: Any, version: int, **options: Any) -> None:
        with self.prepare_update(source, version) as apply:
            apply("keep", "keep")

    @contextlib.contextmanager
    def prepare_update(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False
    ) -> Iterator[Callable[[str, str], None]]:
        if set(source) != {"w"}:
            raise ValueError(f"unknown weights {sorted(set(source) - {'w'})}")
        self._die_once("stage")
        yield lambda in_flight, kv: self._apply(version)

    def _apply(self, version: int) -> None:
        self._die_once("apply")
        self.version = version

    def _die_once(self, half: str) -> None:
        """`die_times` actors of the pool, and no more, end in this half."""
        for number in range(self._die_times if self._die_at == half and self._journal else 0):
            with contextlib.suppress(FileExistsError):
                (self._journal / f"death-{number}").open("x").close()
                os._exit(1)

    def sleep(self, level: int = 1, *, in_flight: str = "wait") -> None:
        self.asleep = level

    def wake(self, source: Any = None, version: int | None = None, **options: Any) -> None:
        if source is None and self.asleep == 2:
            raise ValueError("sleep(level=2) kept no weights: call wake(weights, version)")
        self.asleep = 0
        if source is not None:
            self.update_weights(source, version or 0)

    def close(self) -> None:
        for stream in self._streams:
            stream.abort()

    def _note(self, what: str, name: str) -> None:
        if self._journal is not None:
            (self._journal / f"{what}-{name.replace('/', '_')}").touch()

    def _count(self, what: str) -> int:
        return len(list(self._journal.glob(f"{what}-*"))) if self._journal is not None else 0


class FakeStream(Iterator[InMemory]):
    """One stream of the fake: like the engine's, `abort` ends its own requests and no others."""

    def __init__(self, backend: FakeBackend, requests: Sequence[SampleRequest]) -> None:
        self._backend, self._requests = backend, deque(requests)
        self._stopped = threading.Event()

    def __next__(self) -> InMemory:
        if not self._requests:
            raise StopIteration
        return InMemory([self._backend.answer(self._requests.popleft(), self._stopped)])

    def abort(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self._requests.clear()
        self.abort()


def empty_trace(request: SampleRequest, finish_reason: Any, error: str | None = None) -> Trace:
    """A request that ended before its first token."""
    return Trace(
        sample_id=request.sample_id,
        step=request.step,
        prompt_ids=list(request.prompt_ids),
        completion_ids=[],
        logprobs=np.zeros(0, np.float32),
        routed_experts=None,
        finish_reason=finish_reason,
        error=error,
    )
