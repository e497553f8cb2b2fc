"""The engine: schedule, launch, process. `overlap_loop` and `normal_loop` differ only in when results are processed.

With overlap, step N + 1 is launched from tokens that are still on the device, then the results of step N are processed
on the host while N + 1 runs. A request that turns out to have stopped in step N has its token of N + 1 dropped; the
end by length is known when scheduling and never launches one.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rollout.backend import PauseMode, SampleRequest
from rollout.engine_stats import EngineStats, StepEvent
from rollout.forward_batch import GenerationBatchResult
from rollout.lockstep import Lockstep, Turn
from rollout.model_runner import ModelRunner
from rollout.parallel import StepShape
from rollout.request import Request
from rollout.request_logprobs import RequestLogprobs
from rollout.request_routes import RequestRoutes
from rollout.rng import stream_key
from rollout.scheduler import Scheduler, Work
from rollout.stops import StopChecker
from storage.trace import RoutingSpec, expected_rows

logger = logging.getLogger(__name__)


class Occupancy(NamedTuple):
    """Requests that wait and run, slots of the pool and those in use."""

    waiting: int
    running: int
    slots: int
    used: int


class Engine:
    """Runs requests to their end. Not thread-safe: one thread owns it (see local_backend.py).

    Args:
        on_finish: called with each finished request, in the order in which they finish.
        lockstep: for a rank of a group. It joins every step of the group, and a step that fails there ends the engine:
            the other ranks cannot go on without it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        spec: RoutingSpec,
        eos_token_ids: tuple[int, ...],
        tokenizer: Any,
        overlap: bool,
        on_finish: Callable[[Request], None],
        lockstep: Lockstep | None = None,
    ) -> None:
        self._lockstep = lockstep
        self.stats = EngineStats()
        self._runner = runner
        self._scheduler = scheduler
        self._spec = spec
        self._eos_token_ids = eos_token_ids
        self._tokenizer = tokenizer
        self._on_finish = on_finish
        self._in_flight: deque[GenerationBatchResult] = deque()
        self._launched = False
        self._held = False
        self.step = self.overlap_loop if overlap else self.normal_loop

    @property
    def weight_version(self) -> int:
        """Of the weights that the next step runs with."""
        return self._scheduler.weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self._scheduler.weights_changed(version)

    @property
    def resting(self) -> bool:
        """A step would do nothing until a request comes or `resume` is called."""
        return self._has_nothing and (self._lockstep is None or self._lockstep.idle)

    @property
    def _has_nothing(self) -> bool:
        return not self._in_flight and (self._held or self._scheduler.waits)

    @property
    def paused(self) -> bool:
        """Running requests stay where they are until `resume`."""
        return self._held

    @property
    def idle(self) -> bool:
        """No request waits or runs and no step is in flight."""
        return self._scheduler.idle and not self._in_flight

    @property
    def running(self) -> list[Request]:
        """Requests that have begun and not ended, also those that yielded their slots for the moment."""
        return self._scheduler.begun

    @property
    def occupancy(self) -> Occupancy:
        """How full it is; other threads may ask, and see a moment that never quite was."""
        scheduler = self._scheduler
        size = scheduler.slots.size
        return Occupancy(len(scheduler.waiting), len(scheduler.running), size, size - scheduler.slots.free_slots)

    @property
    def hold(self) -> bool:
        """Whether requests that wait are kept waiting: for an update, or while the engine sleeps."""
        return self._scheduler.hold

    @hold.setter
    def hold(self, hold: bool) -> None:
        self._scheduler.hold = hold

    def may_change(self, ready: bool) -> bool:
        """Whether an update that waits is carried out now: when it is `ready`, in a group when all ranks are."""
        return ready if self._lockstep is None else self._lockstep.may_change(ready)

    def changed(self) -> None:
        """The update that waited is done."""
        if self._lockstep is not None:
            self._lockstep.changed()

    def new_request(self, request: SampleRequest) -> Request:
        """A request under the current weights, to be queued with `add`."""
        entry = Request(
            request=request,
            stop=StopChecker(request.sampling_params, self._eos_token_ids, self._tokenizer),
            random_key=stream_key(request.seed, request.stream_id or request.sample_id),
            routes=None,
            weight_version=self.weight_version,
            wanted=RequestLogprobs.wanted_by(request.sampling_params, len(request.prompt_ids)),
        )
        return entry

    def add(self, request: Request) -> None:
        """Queue a request. One that cannot be set up ends at once with its error."""
        try:
            self._scheduler.check_fits(request)
            if self._runner.capturer is not None:
                request.routes = RequestRoutes(self._spec, request.max_rows)
            if request.request.start is not None and self._runner.forcing is None:
                raise ValueError(f"{type(self._runner.model).__name__} cannot compute tokens under replay")
            request.restore()
        except Exception as error:
            self._scheduler.add(request)
            self._end_with(request, error)
        else:
            self._scheduler.add(request)

    def overlap_loop(self) -> None:
        """One turn: launch the next step, then process the one before it."""
        self._launch_next()
        if len(self._in_flight) > 1 or (self._in_flight and not self._launched):
            self._process(self._in_flight.popleft())

    def normal_loop(self) -> None:
        """One turn: launch a step and process it."""
        self._launch_next()
        if self._in_flight:
            self._process(self._in_flight.popleft())

    def abort(self, requests: Iterable[Request]) -> None:
        """End requests now, wherever they are; their tokens still in flight are dropped."""
        for request in list(requests):
            if request.finish_reason is None:
                self._finish(request, "abort", None)

    def pause(self, mode: PauseMode) -> None:
        """Launch nothing more; with "wait" only what has begun. See Backend.pause."""
        if mode == "abort":
            self.abort(self._scheduler.requests())
        elif mode == "yield":
            self.yield_all()
        self._scheduler.admits_new = False
        self._held = mode != "wait"

    def resume(self) -> None:
        """Go on."""
        self._scheduler.admits_new, self._held = True, False

    def check(self) -> None:
        """Every slot and row has one owner or none. Raises RuntimeError naming what leaked."""
        self._scheduler.check()

    def forget_prefixes(self) -> None:
        """Drop cached keys and values that no running request uses."""
        self._scheduler.weights_changed(self.weight_version)

    def yield_all(self) -> None:
        """All running requests give up their slots. They recompute them under replay of their rows."""
        self.drain()
        for request in sorted(self._scheduler.running, key=lambda r: -r.arrival):
            self._scheduler.preempt(request)

    def drain(self) -> None:
        """Process the steps in flight without launching more."""
        while self._in_flight:
            self._process(self._in_flight.popleft())

    def _launch_next(self) -> None:
        begun = time.perf_counter()
        batch = [] if self._held else self._scheduler.schedule()
        self.stats.schedule_seconds += time.perf_counter() - begun
        shape = None if self._lockstep is None else self._agree(self._lockstep, batch)
        self._launched = bool(batch) or shape is not None
        if not self._launched:
            return
        step = self.stats.forwards
        try:
            result = self._runner.launch(step, batch, shape)
        except Exception as error:
            self._fail(step, batch, error)
            return
        self.stats.cached_tokens, self.stats.preemptions = self._scheduler.cached_tokens, self._scheduler.preemptions
        tokens, now = sum(work.length for work in batch), time.perf_counter()
        for work in batch:
            work.request.launched(work.start + work.length, self.weight_version, now)
        self.stats.forwards += 1
        self.stats.tokens += tokens
        self._in_flight.append(result)
        self.stats.events.append(StepEvent("launch", step, now, tokens))

    def _agree(self, lockstep: Lockstep, batch: list[Work]) -> StepShape | None:
        """The next step's shape; None when no rank has anything to compute."""
        tokens = sum(work.length for work in batch)
        decodes = all(work.is_decode for work in batch)
        busy = bool(batch) or not self._has_nothing
        return lockstep.agree(self.stats.forwards, Turn(tokens, self._runner.rows_for(tokens), decodes, busy))

    def _process(self, result: GenerationBatchResult) -> None:
        try:
            result.finalize()
        except Exception as error:
            self._fail(result.step, result.batch, error)
            return
        self.stats.processed(result)
        begun = time.perf_counter()
        for work in result.batch:
            work.request.in_flight -= 1
            work.request.confirmed = work.start + work.length
        for work, output in zip([w for w in result.batch if w.samples], result.outputs(), strict=True):
            self._deliver(work.request, *output)
        self.stats.deliver_seconds += time.perf_counter() - begun

    def _deliver(self, request: Request, token: int, logprob: float, raw_logprob: float) -> None:
        if request.finish_reason is not None:
            self.stats.dropped_tokens += 1
            logger.debug("a token of %s is dropped: it had stopped in the step before", request.request.sample_id)
        elif not (math.isfinite(raw_logprob) and math.isfinite(logprob)):
            at = f"completion token {len(request.output_ids)}"
            problem = f"the model's logits for {at} are not finite"
            if math.isfinite(raw_logprob):
                problem = f"allowed_token_ids, bad_words, logit_bias and min_tokens together leave no {at} to draw"
            self._end_with(request, ValueError(problem))
        elif request.max_tokens == 0:
            self._finish(request, "length", None)
        else:
            self._append(request, token, logprob, raw_logprob)

    def _append(self, request: Request, token: int, logprob: float, raw_logprob: float) -> None:
        self.stats.sampled_tokens += 1
        request.output_ids.append(token)
        request.logprobs.append(logprob)
        request.raw_logprobs.append(raw_logprob)
        try:
            ended = request.stop(request.output_ids)
        except Exception as error:  # a tokenizer's, say: it ends this request, not its neighbours
            self._end_with(request, error)
            return
        if ended is not None:
            self._finish(request, *ended)

    def _finish(self, request: Request, reason: Any, stop_reason: int | str | None) -> None:
        if request.finish_reason is not None:
            return
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.began is not None:
            request.seconds = time.perf_counter() - request.began
        if request.routes is not None:
            request.routes.seal()
        self._count_ended(request)
        self._scheduler.release(request)
        self._on_finish(request)

    def _count_ended(self, request: Request) -> None:
        rows = expected_rows(request.prompt_len, len(request.output_ids), request.finish_reason or "error")
        recorded = 0 if request.routes is None else min(request.routes.filled, rows)
        self.stats.ended += 1
        self.stats.missing_rows += rows - recorded

    def _end_with(self, request: Request, error: Exception) -> None:
        if request.finish_reason is None:
            request.error = f"{type(error).__name__}: {error}"
        self._finish(request, "error", None)

    def _fail(self, step: int, batch: list[Work], error: Exception) -> None:
        """A step that failed ends its own requests, with the reason; the others go on."""
        if self._lockstep is not None:
            self._in_flight.clear()
            raise error
        logger.error("step %d failed: %s", step, error, exc_info=error)
        failed = {work.request for work in batch}
        for request in [work.request for work in batch]:
            self._end_with(request, error)
        for request in sorted(self._scheduler.running, key=lambda r: r.arrival):
            if request.leader in failed:  # it copied what was not computed
                failed.add(request)
                self._end_with(request, error)
