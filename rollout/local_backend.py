"""The engine in this process: one thread schedules, one runs the model, callers wait on queues."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any, Literal

from rollout.backend import ModelInfo, PauseMode, SampleRequest, check_pause_mode, known_samples
from rollout.build import BuiltEngine, build_engine
from rollout.config import EngineOptions
from rollout.engine_stats import engine_figures
from rollout.figures import Figures
from rollout.local_stream import LocalStream, Outbox
from rollout.lockstep import Membership
from rollout.request import Request
from rollout.traces import trace_of
from rollout.update_modes import InFlight, KVMode, OneAtATime, UpdatesByHalves, check_sleep
from rollout.weight_updates import WeightUpdates
from storage.trace import Trace

logger = logging.getLogger(__name__)


class LocalBackend(UpdatesByHalves):
    """A Backend over one engine in this process.

    >>> backend = LocalBackend("path/to/qwen3-moe", dtype="float32")
    >>> next(backend.stream([SampleRequest("run/0/0-0/0", 0, (5, 7), SamplingParams(max_tokens=4, seed=0))])).traces()

    Raises:
        FileNotFoundError, ValueError: the model cannot be loaded, recorded or run exactly; see loader.py, self_test.py.
    """

    has_refs = False

    def __init__(self, model: str, *, member: Membership | None = None, **engine_options: Any) -> None:
        self.options = EngineOptions(**engine_options)
        self._built: BuiltEngine = build_engine(str(model), self.options, self._on_finish, member)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outboxes: dict[Request, Outbox] = {}
        self._streams: weakref.WeakSet[LocalStream] = weakref.WeakSet()
        self._pausing: list[Future[None]] = []
        self._updates = WeightUpdates(self._built, self._post)
        self._turns = OneAtATime()
        self._dead: BaseException | None = None
        self._closed = False
        self._stopping = False
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # no command is queued behind the one that stops the engine
        self._thread = threading.Thread(target=self._run, name="moe-rollout-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread that computes while the interpreter ends would abort the process

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._built.info

    @property
    def stats(self) -> Any:
        """The engine's counts and event log."""
        return self._built.engine.stats

    def figures(self) -> Figures:
        """See `Backend.figures`."""
        return engine_figures(self._built)

    @property
    def progress(self) -> int:
        """Grows with every token that is computed, prompts' too."""
        return int(self.stats.tokens)

    @cached_property
    def window(self) -> int:
        """How many requests one stream keeps submitted: a consumer that pauses holds at most this many results."""
        return 2 * self.options.max_running_requests

    def stream(self, requests: Sequence[SampleRequest]) -> LocalStream:
        """Each request's trace once, as they finish. Closing the stream aborts the rest.

        Raises:
            RuntimeError: the engine sleeps.
        """
        if self._updates.asleep:
            raise RuntimeError("the engine sleeps, its weights are not on the device: call wake() before sampling")
        stream = LocalStream(self, requests)
        with self._lock:
            self._streams.add(stream)
        return stream

    def pause(self, mode: PauseMode = "keep") -> None:
        """See Backend.pause."""
        check_pause_mode(mode)
        if mode == "abort":
            self.abort("all")
        at_rest: Future[None] = Future()

        def pause() -> None:
            self._built.engine.pause(mode)
            self._pausing.append(at_rest)

        self._call(pause)
        at_rest.result()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._call(self._built.engine.resume)

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """See Backend.abort. A sample is known until its trace is taken."""
        with self._lock:
            streams = list(self._streams)
        known = {sample_id for stream in streams for sample_id in stream.outstanding()}
        wanted = known_samples(sample_ids, known)
        for stream in streams:
            stream.discard(wanted)
        self._post(lambda: self._built.engine.abort([e for e in self._outboxes if e.request.sample_id in wanted]))

    @contextlib.contextmanager
    def prepare_update(
        self,
        source: Any,
        version: int,
        *,
        force: bool = False,
        check_finite: bool = False,
        saved: bool | None = None,
    ) -> Iterator[Callable[[InFlight, KVMode], None]]:
        """The two halves of an update: entering checks and stages it, the function applies it, leaving drops it.

        The source is read and checked while the engine goes on sampling.

        A pool of engines applies only when all have staged. `saved` as in `weights.stage`.
        """
        with self._turns.take(f"update_weights to version {version!r}"):
            self._check_awake("update_weights", "wake(weights, version)")
            staged = self._built.stage_weights(source, version, force, check_finite, saved)
            yield lambda in_flight, kv: self._updates.apply(staged, version, in_flight, kv)

    def sleep(self, level: int = 1, *, in_flight: InFlight = "wait") -> None:
        """See `RolloutClient.sleep`."""
        check_sleep(level, in_flight)
        with self._turns.take("sleep"):
            self._check_awake("sleep", "wake()")
            self._updates.sleep(level, in_flight)

    def wake(
        self,
        source: Any = None,
        version: int | None = None,
        *,
        force: bool = False,
        check_finite: bool = False,
        saved: bool | None = None,
    ) -> None:
        """See `RolloutClient.wake`."""
        with self._turns.take("wake"):
            parked = self._built.parked
            if parked is None:
                raise RuntimeError("wake() of an engine that does not sleep")
            if source is None and not parked.keep:
                raise ValueError("sleep(level=2) kept no weights: call wake(weights, version)")
            staged = None
            if source is not None:
                staged = self._built.stage_weights(source, version, force, check_finite, saved)  # type: ignore[arg-type]
            self._updates.wake(staged, version or 0)

    def check_weights(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False, saved: bool | None = None
    ) -> None:
        """Raise what `wake` would raise for these weights; nothing changes."""
        self._built.stage_weights(source, version, force, check_finite, saved)

    def _check_awake(self, what: str, remedy: str) -> None:
        if self._updates.asleep:
            raise RuntimeError(f"{what} while the engine sleeps; call {remedy}")

    @property
    def is_dead(self) -> bool:
        """Whether an error has ended the engine."""
        return self._dead is not None

    def wait_stopped(self) -> BaseException | None:
        """Wait until the engine has ended: the error that ended it, None when it was closed."""
        self._stopped.wait()
        return self._dead

    def wake_rank(self, epoch: int) -> None:
        """Some rank of this one's group was fed; see Lockstep.wake."""
        lockstep = self._built.lockstep
        if lockstep is not None:
            self._put(lambda: lockstep.wake(epoch))

    def rank_stats(self) -> dict[str, Any]:
        """Of a rank: counts, seconds in collectives of the forward and in agreements between steps, steps padded as
        under a graph, bytes of its experts and rows of its capture."""
        built, lockstep = self._built, self._built.lockstep
        experts = [p.nbytes for name, p in built.runner.model.named_parameters() if ".experts." in name]
        return {
            **{name: value for name, value in vars(built.engine.stats).items() if isinstance(value, int)},
            "collective_seconds": lockstep.ranks.seconds if lockstep is not None else 0.0,
            "agreement_seconds": lockstep.seconds if lockstep is not None else 0.0,
            "graph_steps": lockstep.ranks.graph_steps if lockstep is not None else 0,
            "expert_bytes": sum(experts),
            "capture_rows": built.runner.capturer.max_rows if built.runner.capturer is not None else 0,
        }

    def close(self) -> None:
        """Abort what runs, stop both threads. Streams that wait get the aborted traces."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._commands.put(None)
        self._thread.join()
        atexit.unregister(self.close)

    def submit(self, requests: Sequence[SampleRequest], outbox: Outbox, unwanted: set[str]) -> list[Request]:
        """Queue requests for the engine; each comes back through `outbox` when it has ended, or the error that ended
        the engine does. The list fills as the engine takes them. The `unwanted` ones end at once.

        Raises:
            RuntimeError: this engine is closed.
        """
        entries: list[Request] = []

        def add() -> None:
            for request in requests:
                try:
                    entry = self._built.engine.new_request(request)
                except Exception as error:  # the call's, not the engine's
                    outbox.put(error)
                    return
                entries.append(entry)
                self._outboxes[entry] = outbox
                self._built.engine.add(entry)
                if request.sample_id in unwanted:
                    self._built.engine.abort([entry])

        self._post(add)
        return entries

    def abort_requests(self, entries: list[Request]) -> None:
        """End these requests now, from any thread; they come back with finish_reason "abort"."""
        self._put(lambda: self._built.engine.abort(entries))

    def _post(self, command: Callable[[], None]) -> None:
        if not self._put(command):
            raise self._ended() from self._dead

    def _put(self, command: Callable[[], None]) -> bool:
        """Queue a command for the engine's thread; False when it has stopped."""
        with self._lock:
            running = self._dead is None and not self._closed
            if running:
                self._commands.put(command)
            return running

    def _call(self, command: Callable[[], None]) -> None:
        """Run a command on the engine's thread and wait for it."""
        answer: Future[None] = Future()

        def answered() -> None:
            try:
                command()
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(None)

        self._post(answered)
        answer.result()

    def _on_finish(self, request: Request) -> None:
        self._outboxes.pop(request).put(request)

    def _run(self) -> None:
        try:
            while self._receive():
                if not self._built.engine.resting:
                    self._built.engine.step()
                self._updates.turn()
        except BaseException as error:
            logger.exception("the engine stopped")
            with self._lock:
                self._dead = error
            while not self._commands.empty():
                self._run_late(self._commands.get())
            for outbox in {id(box): box for box in self._outboxes.values()}.values():
                outbox.put(error)
        finally:
            self._stopped.set()
            while self._pausing:
                self._pausing.pop().set_exception(self._ended())
            self._updates.cancel(self._dead)
            self._built.close()

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"this engine has stopped: {self._dead}" if self._dead else "this engine is closed")

    @staticmethod
    def _run_late(command: Callable[[], None] | None) -> None:
        """So that whoever queued it is among those who are told; its own error must not keep them from being told."""
        try:
            if command is not None:
                command()
        except Exception:
            logger.exception("a command that met a stopped engine failed")

    def _rest(self) -> None:
        """The engine has come to rest: nothing may have leaked, and whoever waits for a pause has it."""
        self._built.engine.check()
        while self._pausing:
            self._pausing.pop().set_result(None)

    def _receive(self) -> bool:
        """Run the commands that wait; block for one when idle. False to stop."""
        while True:
            if resting := self._built.engine.resting:
                self._rest()
                if self._stopping:
                    return False
            try:
                command = self._commands.get(block=resting)
            except queue.Empty:
                return True
            if command is None:
                self._built.engine.abort(list(self._outboxes))
                if self._built.lockstep is None:
                    return False
                self._stopping = True  # once all ranks rest: none is to wait for one that is gone
                continue
            command()

    def trace(self, request: Request) -> Trace:
        """The trace of an ended request."""
        return trace_of(request, self._built.tokenizer, self.info.fingerprint)
