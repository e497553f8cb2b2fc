"""Weight updates and sleep of one engine: prepared on the caller's thread, carried out on the engine's between steps.

The engine's thread owns the engine. `WeightUpdates` hands it an action and the condition under which it may run: at
once, or when no request runs any more, until which no waiting request is admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from rollout.build import BuiltEngine
from rollout.update_modes import WAITS_FOR_EVER, InFlight, KVMode
from rollout.weights import StagedWeights


class Pending(NamedTuple):
    """An action that waits, for the end of all running requests if `quiet`."""

    action: Callable[[], None]
    done: Future[None]
    quiet: bool


class WeightUpdates:
    """The quiet moments of one engine.

    Args:
        post: queues a command for the engine's thread; raises when that has ended.
    """

    def __init__(self, built: BuiltEngine, post: Callable[[Callable[[], None]], None]) -> None:
        self._built = built
        self._post = post
        self._pending: Pending | None = None
        self.asleep = False

    def apply(self, staged: StagedWeights, version: int, in_flight: InFlight, kv: KVMode) -> None:
        """Copy staged weights between two steps and wait until it is done."""
        if kv == "recompute":
            self._built.check_recompute()
        self._quietly(lambda: self._built.apply_weights(staged, version, kv == "recompute"), in_flight)

    def sleep(self, level: int, in_flight: InFlight) -> None:
        """Free the device's memory once no request runs, and admit none until `wake`."""

        def fall_asleep() -> None:
            self._built.sleep(level)
            self.asleep = True

        self._quietly(fall_asleep, in_flight)

    def wake(self, staged: StagedWeights | None, version: int) -> None:
        """Take the memory back, with the weights from before or with new ones."""

        def wake() -> None:
            self._built.wake(staged, version)
            self.asleep = False

        self._quietly(wake, "keep")

    def turn(self) -> None:
        """The engine's thread calls this after each step: run the action that waits, if it may run now. The ranks of a
        group run it behind the same step.

        An action that fails half-way has left the weights torn: its error ends the engine.
        """
        engine = self._built.engine
        if self._pending is None or not engine.may_change(not (self._pending.quiet and engine.running)):
            return
        pending, self._pending = self._pending, None
        try:
            if pending.quiet:
                engine.drain()
            pending.action()
        except BaseException as error:
            pending.done.set_exception(error)
            raise
        engine.changed()
        engine.hold = self.asleep
        pending.done.set_result(None)

    def cancel(self, error: BaseException | None) -> None:
        """The engine has ended: whoever waits is told."""
        if self._pending is not None:
            self._pending.done.set_exception(error or RuntimeError("this engine was closed before the update"))
            self._pending = None

    def _quietly(self, action: Callable[[], None], in_flight: InFlight) -> None:
        done: Future[None] = Future()

        def begin() -> None:
            if in_flight == "wait" and self._waits_for_ever():
                done.set_exception(RuntimeError(WAITS_FOR_EVER))
                return
            quiet = in_flight != "keep"
            if quiet:
                self._built.engine.hold = True
            self._pending = Pending(action, done, quiet)
            if in_flight == "abort":
                self._built.engine.abort(self._built.engine.running)
            self.turn()

        self._post(begin)
        done.result()

    def _waits_for_ever(self) -> bool:
        """In a group whoever asks all ranks has looked: one that refused alone would keep those without requests
        waiting. Paused in between, they all go on after `resume`."""
        engine = self._built.engine
        return self._built.lockstep is None and engine.paused and bool(engine.running)
