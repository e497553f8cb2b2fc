"""What an engine counts while it runs: a few additions per step and per request, none per token but the tokens."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from rollout.build import BuiltEngine
    from rollout.figures import Figures
    from rollout.forward_batch import GenerationBatchResult


class StepEvent(NamedTuple):
    """Something that happened to a step on the host; `seconds` is `time.perf_counter()`."""

    kind: Literal["launch", "finalize"]
    step: int
    seconds: float
    tokens: int


@dataclass
class StepSeconds:
    """Where steps spend their time: on the host preparing inputs, and on the device's thread in the model and in
    sampling. On an accelerator the latter two are what it takes to queue them."""

    prepare: float = 0.0
    model: float = 0.0
    sample: float = 0.0


@dataclass
class EngineStats:
    """Counts since the engine started. `tokens` were computed, `cached_tokens` copied instead. `dropped_tokens`:
    sampled for requests that had already stopped. `preemptions`: how often a request yielded its slots. `seconds`: in
    which steps were under way; of these the host spent `schedule_seconds` choosing the next batch, `wait_seconds`
    waiting, `finalize_seconds` handing rows over, and `deliver_seconds` handing tokens over and ending requests.
    """

    forwards: int = 0
    tokens: int = 0
    sampled_tokens: int = 0
    dropped_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    ended: int = 0
    missing_rows: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    finalize_seconds: float = 0.0
    schedule_seconds: float = 0.0
    deliver_seconds: float = 0.0
    events: deque[StepEvent] = field(default_factory=lambda: deque(maxlen=4096))
    _until: float = 0.0

    def processed(self, result: GenerationBatchResult) -> None:
        """Count a step whose results are on the host; it overlaps with the one before."""
        now = time.perf_counter()
        self.seconds += now - max(result.launched, self._until)
        self.wait_seconds += result.wait_seconds
        self.finalize_seconds += result.finalize_seconds
        self._until = now
        self.events.append(StepEvent("finalize", result.step, now, 0))


def engine_figures(built: BuiltEngine) -> Figures:
    """The counts and the state of an engine under the names of rollout/figures.py; for any thread, takes no lock."""
    engine, capturer, seconds = built.engine, built.runner.capturer, built.runner.seconds
    stats, (waiting, running, slots, used) = engine.stats, engine.occupancy
    return {
        "engines": 1,
        "requests_waiting": waiting,
        "requests_running": running,
        "requests_ended_total": stats.ended,
        "steps_total": stats.forwards,
        "tokens_computed_total": stats.tokens,
        "tokens_sampled_total": stats.sampled_tokens,
        "tokens_cached_total": stats.cached_tokens,
        "tokens_dropped_total": stats.dropped_tokens,
        "preemptions_total": stats.preemptions,
        "step_seconds_total": stats.seconds,
        "wait_seconds_total": stats.wait_seconds,
        "schedule_seconds_total": stats.schedule_seconds,
        "prepare_seconds_total": seconds.prepare,
        "model_seconds_total": seconds.model,
        "sample_seconds_total": seconds.sample,
        "capture_seconds_total": capturer.seconds if capturer is not None else 0.0,
        "finalize_seconds_total": stats.finalize_seconds,
        "deliver_seconds_total": stats.deliver_seconds,
        "kv_slots": slots,
        "kv_slots_used": used,
        "kv_used_ratio": used / max(slots, 1),
        "missing_route_rows_total": stats.missing_rows,
        "weight_version": engine.weight_version,
    }
