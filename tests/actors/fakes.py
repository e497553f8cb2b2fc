"""A backend without a model, for tests of what surrounds one: traces are a function of sample id and weight version."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Collection, Generator, Sequence
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
    """Samples one request after another.

    Options:
        journal: a folder; every started request leaves an empty file there, named after its sample.
        die_at, die_times: kill the process when it comes to this sample, as often as that (counted in the journal).
        fail_at: raise ValueError at this sample.  load_error: raise FileNotFoundError instead of loading.
    """

    def __init__(
        self,
        model: str,
        *,
        journal: str | None = None,
        die_at: str | None = None,
        die_times: int = 1,
        fail_at: str | None = None,
        load_error: str | None = None,
    ) -> None:
        if load_error:
            raise FileNotFoundError(load_error)
        self.info = ModelInfo(SPEC, 100, 4096, "the fake's own limit", None, True)
        self._journal = Path(journal) if journal else None
        self._die_at, self._die_times, self._fail_at = die_at, die_times, fail_at
        self._version = 0
        self._aborted: set[str] = set()
        self._closed = False
        self._wake = threading.Event()

    def stream(self, requests: Sequence[SampleRequest]) -> Generator[InMemory, None, None]:
        for request in requests:
            self._note("start", request.sample_id)
            if request.sample_id == self._die_at and self._count("death") < self._die_times:
                self._note("death", f"{os.getpid()}")
                time.sleep(0.2)  # let what was yielded before reach the driver
                os._exit(1)
            if request.sample_id == self._fail_at:
                raise ValueError(f"sample {request.sample_id} hit a bad kernel")
            self._work(request)
            yield InMemory([self._trace(request)])

    def _work(self, request: SampleRequest) -> None:
        end = time.monotonic() + request.prompt_ids[1] / 1000
        while not self._stopped(request) and (left := end - time.monotonic()) > 0:
            self._wake.wait(left)

    def _trace(self, request: SampleRequest) -> Trace:
        if not self._stopped(request):
            return expected_trace(request, self._version)
        self._note("abort", request.sample_id)
        return Trace(
            sample_id=request.sample_id,
            step=request.step,
            prompt_ids=list(request.prompt_ids),
            completion_ids=[],
            logprobs=np.zeros(0, np.float32),
            routed_experts=None,
            finish_reason="abort",
        )

    def _stopped(self, request: SampleRequest) -> bool:
        return self._closed or request.sample_id in self._aborted

    def abort(self, sample_ids: Collection[str]) -> None:
        self._aborted.update(sample_ids)
        self._wake.set()

    def update_weights(self, source: Any, version: int) -> None:
        if set(source) != {"w"}:
            raise ValueError(f"unknown weights {sorted(set(source) - {'w'})}")
        self._version = version

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def _note(self, what: str, name: str) -> None:
        if self._journal is not None:
            (self._journal / f"{what}-{name.replace('/', '_')}").touch()

    def _count(self, what: str) -> int:
        return len(list(self._journal.glob(f"{what}-*"))) if self._journal is not None else 0
