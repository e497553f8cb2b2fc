"""One `sample` or `stream` call from its first request to its commit: stream, reward, record, commit or abandon."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field

from rollout.backend import Backend, Finished, FinishedStream, Recorder, SampleRequest
from rollout.reporting import Reporter
from rollout.rewards import RewardRunner
from rollout.steps import Call, StepLedger
from storage.trace import Trace

logger = logging.getLogger(__name__)
MAX_PENDING_REWARDS = 64


@dataclass(frozen=True)
class Parties:
    """Who takes part in every call of a client; `closed` is set when the client is."""

    backend: Backend
    recorder: Recorder | None
    rewards: RewardRunner | None
    steps: StepLedger
    closed: threading.Event
    reporter: Reporter
    gate: threading.Lock = field(default_factory=threading.Lock)

    def write(self, call: Call, finished: Finished, rewards: dict[str, float] | None) -> None:
        """Stage traces of a call, unless its step has ended meanwhile."""
        with self.gate:
            if not self.steps.is_live(call):
                raise RuntimeError(f"step {call.step} has ended; this call is no longer a part of it")
            if (recorder := self.recorder) is not None:
                self.reporter.write(lambda: recorder.write(finished, call.step, rewards))

    def end_step(self, step: int, committed: bool) -> None:
        """Close the open step; calls that outlive it stage nothing any more."""
        with self.gate:
            self.steps.close(committed)
            if not committed:
                self.abandon(step)

    def commit(self, step: int) -> bool:
        """Commit what was staged; without a recorder there is nothing to do. False when the step is empty."""
        recorder = self.recorder
        if recorder is None:
            return True
        committed = self.reporter.commit(lambda: recorder.commit(step))
        if not committed:
            logger.warning("step %d holds no trace to commit", step)
        return committed

    def abandon(self, step: int) -> None:
        """Drop what was staged."""
        if self.recorder is not None:
            self.recorder.abandon(step)


class RunningCall:
    """A call under way. One thread iterates `finished()`; any thread may `abort()`."""

    def __init__(self, parties: Parties, call: Call, requests: list[SampleRequest]) -> None:
        self._parties = parties
        self._call = call
        self._requests = requests
        self._stream: FinishedStream | None = None
        self._aborted = threading.Event()

    def abort(self) -> None:
        """End the call early: its iterator raises RuntimeError and nothing is committed."""
        self._aborted.set()
        if self._stream is not None:
            self._stream.abort()

    def collect(self) -> list[Trace]:
        """All traces, in the order of the requests, after the commit."""
        traces = {trace.sample_id: trace for finished in self.finished() for trace in finished.traces()}
        return [traces[request.sample_id] for request in self._requests]

    def finished(self) -> Generator[Finished, None, None]:
        """Traces as they finish, with rewards; behind the last one the step is committed. Closing it early aborts."""
        step, done = self._call.step, False
        try:
            self._stream = self._parties.backend.stream(self._requests)
            self._check_going_on()
            with contextlib.closing(_rewarded(self._stream, self._parties.rewards)) as stream:
                for finished, rewards in stream:
                    self._check_going_on()
                    self._parties.write(self._call, finished, rewards)
                    yield finished
            self._check_going_on()
            done = self._parties.commit(step) if self._call.commits else True
        finally:
            try:
                if self._call.commits and not done:
                    self._parties.abandon(step)
            finally:
                self._parties.steps.end(self._call, done)
        if done and self._call.commits:
            self._parties.reporter.step_ended(step)

    def _check_going_on(self) -> None:
        if self._parties.closed.is_set() or self._aborted.is_set():
            what = "call was cancelled" if self._aborted.is_set() else "client was closed"
            raise RuntimeError(f"the {what} while step {self._call.step} was sampled; nothing was committed")


def _rewarded(
    stream: FinishedStream, runner: RewardRunner | None
) -> Generator[tuple[Finished, dict[str, float] | None], None, None]:
    """Each finished chunk with its rewards by sample_id, as soon as these are known."""
    pending: deque[tuple[Finished, dict[str, Future[float]]]] = deque()
    with contextlib.closing(stream):
        for finished in stream:
            if runner is None:
                yield finished, None
                continue
            scored = [trace for trace in finished.traces() if trace.finish_reason != "error"]
            pending.append((finished, {trace.sample_id: runner.start(trace) for trace in scored}))
            while pending and (len(pending) > MAX_PENDING_REWARDS or all(f.done() for f in pending[0][1].values())):
                yield _await_rewards(*pending.popleft())
        while pending:
            yield _await_rewards(*pending.popleft())


def _await_rewards(finished: Finished, futures: dict[str, Future[float]]) -> tuple[Finished, dict[str, float]]:
    rewards = {sample_id: future.result() for sample_id, future in futures.items()}
    for trace in finished.traces():
        trace.reward = rewards.get(trace.sample_id, trace.reward)
    return finished, rewards
