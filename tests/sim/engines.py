"""Engines on the simulated device and on the CPU, and one workload for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollout.backend import SampleRequest
from rollout.build import BuiltEngine, build_on
from rollout.config import EngineOptions
from rollout.device import AcceleratorStream, CpuStream, Stream
from rollout.request import Request
from rollout.sampling import SamplingParams
from tests.families import save_tiny
from tests.sim.device import DEVICE, SimDevice

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
SHAPES: dict[str, dict[str, Any]] = {"gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]}}
OPTIONS = {
    "max_batch_tokens": 16,
    "kv_tokens": 160,
    "max_running_requests": 4,
    "experts_implementation": "grouped_mm",
    "native_kernels": False,
    "disable_cuda_graph": True,
}
PROMPT_LENGTHS = (9, 1, 30, 2, 17, 5, 24, 3, 1, 12)
STOPS = tuple(range(3, 128, 5))
TURNS_OF_ABORTS = {2: 2, 5: 9, 12: 6}  # turn of the loop: which request, in its prompt, waiting, and decoding


def tiny(family: str, directory: Path) -> Path:
    """A checkpoint of two layers."""
    return save_tiny(family, directory, num_hidden_layers=2, **SHAPES.get(family, {}))


@dataclass
class Rig:
    """An engine whose loop the test turns by hand, so that two runs make the same steps."""

    built: BuiltEngine
    finished: list[Request]
    sim: SimDevice | None = None
    turns: int = 0

    def add(self, length: int, index: int = 0, **params: Any) -> Request:
        prompt = np.random.default_rng(index).integers(3, 128, length).tolist()
        given = SampleRequest(f"run/0/{index}/0", 0, tuple(prompt), SamplingParams(seed=index, **params))
        request = self.built.engine.new_request(given)
        self.built.engine.add(request)
        return request

    def turn(self) -> None:
        self.built.engine.step()
        self.turns += 1

    def finish(self) -> None:
        while not self.built.engine.idle:
            self.turn()


def build(path: Path, stream: Stream, sim: SimDevice | None = None, **options: Any) -> Rig:
    finished: list[Request] = []
    return Rig(build_on(stream, str(path), EngineOptions(**{**OPTIONS, **options}), finished.append), finished, sim)


def on_sim(path: Path, **options: Any) -> Rig:
    sim = SimDevice()
    return build(path, AcceleratorStream(DEVICE, sim), sim, **options)


def on_cpu(path: Path, **options: Any) -> Rig:
    """Weights are copied out of the checkpoint's mapped file: MKL's last bits depend on where a matrix begins."""
    rig = build(path, CpuStream(num_threads=1), **options)
    for parameter in rig.built.runner.model.parameters():
        parameter.data = parameter.data.clone()
    return rig


def mixed_workload(rig: Rig) -> list[Request]:
    """Ten requests over four rows: chunked prompts beside decodes, ends by length in every step, ends by a stop with a
    token in flight, aborts while running and while waiting, and slots whose next owner comes at once."""
    requests = [
        rig.add(
            length,
            index,
            max_tokens=index % 7 + 1,
            temperature=(0.0, 1.0, 0.7)[index % 3],
            top_k=(0, 20)[index % 2],
            top_p=(1.0, 0.9)[index % 3 // 2],
            stop_token_ids=STOPS if index % 4 == 1 else (),
            ignore_eos=True,
        )
        for index, length in enumerate(PROMPT_LENGTHS)
    ]
    first = rig.turns
    while not rig.built.engine.idle:
        rig.turn()
        if rig.turns - first in TURNS_OF_ABORTS:
            rig.built.engine.abort([requests[TURNS_OF_ABORTS[rig.turns - first]]])
    return requests


def short_workload(rig: Rig) -> list[Request]:
    """A chunked prompt, decodes, mixed steps, a length end in most steps and an abort; nothing is random."""
    requests = [
        rig.add(length, index, max_tokens=index + 2, temperature=0, ignore_eos=True)
        for index, length in enumerate((26, 9, 3, 1, 20))
    ]
    for _ in range(4):
        rig.turn()
    rig.built.engine.abort([requests[3]])
    rig.finish()
    return requests


def growing_workload(rig: Rig) -> list[Request]:
    """Four sequences that together outgrow a small pool."""
    requests = [rig.add(6, index, max_tokens=20, temperature=0, ignore_eos=True) for index in range(4)]
    rig.finish()
    return requests


def outcome(request: Request) -> dict[str, Any]:
    """All that a caller gets of a request; the part of an aborted one that was delivered."""
    limit = request.prompt_len + len(request.output_ids) - 1 if request.output_ids else 0
    return {
        "finish_reason": request.finish_reason,
        "error": request.error,
        "tokens": request.output_ids,
        "logprobs": request.logprobs,
        "raw_logprobs": request.raw_logprobs,
        "routes": None if request.routes is None else request.routes.take(limit).tolist(),
    }


def outcomes(requests: list[Request]) -> list[dict[str, Any]]:
    return [outcome(request) for request in requests]


class Mended:
    """One engine for many faults; rebuilt when a fault broke it for good.

    Args:
        build: makes the engine.
        check: raises when its results are wrong.
    """

    def __init__(self, build: Callable[[], Rig], check: Callable[[Rig], None]) -> None:
        self._build, self._check = build, check
        self._rig: Rig | None = None

    def healthy(self, prepare: Callable[[Rig], None]) -> Rig:
        """The engine after `prepare`; it passes the check."""
        if self._rig is None or not self._passes(self._rig, prepare):
            self._rig = self._build()
            assert self._rig.sim is not None
            self._rig.sim.raises = True
            prepare(self._rig)
            self._check(self._rig)
        return self._rig

    def _passes(self, rig: Rig, prepare: Callable[[Rig], None]) -> bool:
        try:
            prepare(rig)
            self._check(rig)
        except Exception:
            return False
        return True
