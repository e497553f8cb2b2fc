"""The trace writer as an actor, and the recorder that feeds one or several of them references instead of tables."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.metrics import CommitMetrics
from actors.remote import DEAD, fetch, first_line
from rollout.backend import Finished
from storage.joint_writer import JointWriter
from storage.open_folder import Parts
from storage.promises import Promises
from storage.schema import set_rewards
from storage.store import is_remote
from storage.trace import RoutingSpec

logger = logging.getLogger(__name__)

OUTSTANDING_WRITES = 16


class SinkDiedError(RuntimeError):
    """The process that wrote the dataset is gone. Committed steps are intact."""


class Sink:
    """One writer. It is opened by a call of its own, so that errors keep their type."""

    def __init__(
        self,
        root: str,
        spec: RoutingSpec,
        promises: Promises | None = None,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"promises": promises, "run": run}
        self._root, self._spec = root, spec
        self._staged: set[int] = set()

    def open(self) -> None:
        """Open the dataset for writing."""
        self._writer = JointWriter(self._root, self._spec, **self._options)

    def write(self, table: pa.Table, step: int, rewards: dict[str, float] | None) -> None:
        """Stage one table; traces that ended in an error are left out."""
        table = table.filter(pc.not_equal(table["finish_reason"], "error"))
        if table.num_rows:
            self._writer.write(set_rewards(table, rewards) if rewards else table, step=step)
            self._staged.add(step)

    def hand_over(self, step: int) -> Parts | None:
        """Close this sink's part of a step for the sink that commits it; None when it has none."""
        self._staged.discard(step)
        return self._writer.hand_over(step)

    def release(self, step: int) -> None:
        """Forget a part that was committed."""
        self._writer.release(step)

    def commit(self, step: int, parts: Sequence[Parts] = ()) -> bool:
        """See `Recorder.commit`; with the parts that other sinks have handed over."""
        if parts:
            self._writer.take_over(parts, step=step)
        elif step not in self._staged:
            return False
        self._writer.commit(step=step)
        self._staged.discard(step)
        return True

    def abandon(self, step: int) -> None:
        """See `Recorder.abandon`."""
        self._staged.discard(step)
        self._writer.abandon(step)

    def taken_steps(self) -> list[int]:
        """See `Recorder.taken_steps`."""
        return list(self._writer.taken_steps())

    def close(self) -> None:
        """Release the dataset."""
        self._writer.close()


class _SinkActor(Sink):
    _metrics: CommitMetrics | None = None

    def commit(self, step: int, parts: Sequence[Parts] = ()) -> bool:
        """The same, and Ray is told how long it took."""
        self._metrics = self._metrics or CommitMetrics()
        begun = time.perf_counter()
        if committed := super().commit(step, parts):
            self._metrics.observe(time.perf_counter() - begun)
        return committed


TraceSink: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(_SinkActor)
"""`Sink` in an actor. Its calls run one by one, in the order in which the recorder made them."""


class RemoteRecorder:
    """Writes traces through `TraceSink`s. Implements `rollout.backend.Recorder`; a table never enters this process.

    >>> recorder = RemoteRecorder("/data/traces", spec, num_sinks=2)
    >>> recorder.write(finished, step=0); recorder.commit(0)

    A table goes to the sink that has the fewest to write. Each sink writes files of its own; the first one commits the
    files of all, so that a step still appears at once. Sinks run on this node, those of an object store anywhere.

    Raises:
        SinkDiedError: when a sink's process died; what was committed before is intact.
        ValueError: after `close`.
        Exception: what the writer raised, in its own type and words. A write's error comes with the next write of its
            step that finds it, and with the commit.
    """

    def __init__(
        self,
        root: str | Path,
        spec: RoutingSpec,
        outstanding_writes: int = OUTSTANDING_WRITES,
        promises: Promises | None = None,
        run: Mapping[str, Any] | None = None,
        num_sinks: int = 1,
    ) -> None:
        if not isinstance(num_sinks, int) or num_sinks < 1:
            raise ValueError(f"num_sinks is {num_sinks!r}, need an integer from 1")
        self._root, self._bound = str(root), outstanding_writes * num_sinks
        self._lock = threading.Lock()
        self._closed = False
        self._running: dict[Any, int] = {}
        self._sent: Counter[int] = Counter()
        self._writes: defaultdict[int, list[Any]] = defaultdict(list)
        make = TraceSink.options(scheduling_strategy=_where(self._root))
        self._sinks = [make.remote(self._root, spec, promises, run) for _ in range(num_sinks)]
        self._ask(self._sinks, "open")

    def taken_steps(self) -> list[int]:
        """See `Recorder.taken_steps`."""
        return self._ask(self._sinks[:1], "taken_steps")[0]

    def write(self, finished: Finished, step: int, rewards: dict[str, float] | None = None) -> None:
        """Send a reference to a sink; waits while `outstanding_writes` per sink are not done yet.

        Raises what an earlier write of `step` met, a full disk for example: more samples would be wasted.
        """
        self._check_open()
        table = ray.put(finished.table()) if finished.ref is None else finished.ref
        with self._lock:
            self._check_done(step)
            index = self._choose()
            write = self._sinks[index].write.remote(table, step, rewards)
            self._running[write] = index
            self._writes[step].append(write)

    def commit(self, step: int) -> bool:
        """Wait for the writes of `step`, then make them visible. A step with a failed write is never committed."""
        with self._lock:
            writes = list(self._writes[step])
        for write in writes:
            self._fetch(write)
        first, *others = self._sinks
        parts = [part for part in self._ask(others, "hand_over", step) if part is not None]
        (committed,) = self._ask([first], "commit", step, parts)
        for sink in others:
            sink.release.remote(step)  # not waited for: one that dies now takes nothing with it
        self._forget(step)
        return committed

    def abandon(self, step: int) -> None:
        """Drop what was staged for `step`, failed writes too. `close` has done so already."""
        if not self._closed:
            self._ask_in_turn("abandon", step)
            self._forget(step)

    def close(self) -> None:
        """Abandon all that was not committed and stop the sinks; fine when they, or Ray, are gone already."""
        if self._closed or not ray.is_initialized():
            return
        try:
            self._ask_in_turn("close")
        except SinkDiedError as error:
            logger.warning("%s", error)
        finally:
            self._closed = True
            for sink in self._sinks:
                ray.kill(sink)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"this RemoteRecorder of {self._root} is closed; open a new one")

    def _check_done(self, step: int) -> None:
        """Raise the error of a write that failed; it stays for `commit` to raise again."""
        writes = self._writes[step]
        if writes:
            done, running = ray.wait(writes, num_returns=len(writes), timeout=0)
            for write in done:
                self._fetch(write)
            self._writes[step] = running

    def _choose(self) -> int:
        """The sink with the fewest writes under way, or until now; waits while all have enough."""
        if len(self._running) >= self._bound:
            ray.wait(list(self._running), num_returns=1)
        if self._running:
            done, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
            self._running = {write: index for write, index in self._running.items() if write not in done}
        counts = Counter(self._running.values())
        chosen = min(range(len(self._sinks)), key=lambda index: (counts[index], self._sent[index]))
        self._sent[chosen] += 1
        return chosen

    def _forget(self, step: int) -> None:
        with self._lock:
            self._writes.pop(step, None)

    def _ask_in_turn(self, method: str, *args: Any) -> None:
        """First the sink that commits, then the others: no commit of their files is under way when they drop them."""
        try:
            self._ask(self._sinks[:1], method, *args)
        finally:
            self._ask(self._sinks[1:], method, *args)

    def _ask(self, sinks: Sequence[Any], method: str, *args: Any) -> list[Any]:
        """Call a method of several sinks at once. All have answered, or died, before an error is raised."""
        self._check_open()
        answers = [getattr(sink, method).remote(*args) for sink in sinks]
        if answers:
            ray.wait(answers, num_returns=len(answers))
        return [self._fetch(answer) for answer in answers]

    def _fetch(self, ref: Any) -> Any:
        try:
            return fetch(ref)
        except DEAD as error:
            self._check_open()
            raise SinkDiedError(
                f"the actor that writes {self._root} died ({first_line(error)}). Committed steps are intact; open the "
                "dataset again and repeat the steps that were not committed"
            ) from error


def _where(root: str) -> NodeAffinitySchedulingStrategy | str:
    """Where the caller runs, since a local path then means the same to all; an object store is the same everywhere."""
    if is_remote(root):
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
