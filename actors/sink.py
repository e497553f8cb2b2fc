"""The trace writer as an actor, and the recorder that feeds it references instead of tables."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.remote import DEAD, fetch, first_line
from rollout.backend import Finished
from storage.schema import set_rewards
from storage.trace import RoutingSpec
from storage.writer import TraceWriter

logger = logging.getLogger(__name__)

OUTSTANDING_WRITES = 16


class SinkDiedError(RuntimeError):
    """The process that wrote the dataset is gone. Committed steps are intact."""


class Sink:
    """One TraceWriter. It is opened by a call of its own, so that errors keep their type."""

    def __init__(
        self,
        root: str,
        spec: RoutingSpec,
        frozen_recompute: bool = True,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"frozen_recompute": frozen_recompute, "run": run}
        self._root, self._spec = root, spec
        self._staged: set[int] = set()

    def open(self) -> None:
        """Open the dataset for writing."""
        self._writer = TraceWriter(self._root, self._spec, **self._options)

    def write(self, table: pa.Table, step: int, rewards: dict[str, float] | None) -> None:
        """Stage one table; traces that ended in an error are left out."""
        table = table.filter(pc.not_equal(table["finish_reason"], "error"))
        if table.num_rows:
            self._writer.write(set_rewards(table, rewards) if rewards else table, step=step)
            self._staged.add(step)

    def commit(self, step: int) -> bool:
        """See `Recorder.commit`."""
        if step not in self._staged:
            return False
        self._writer.commit(step=step)
        self._staged.discard(step)
        return True

    def abandon(self, step: int) -> None:
        """See `Recorder.abandon`."""
        self._staged.discard(step)
        self._writer.abandon(step)

    def committed_steps(self) -> list[int]:
        """See `Recorder.committed_steps`."""
        return list(self._writer.committed_steps())

    def close(self) -> None:
        """Release the dataset."""
        self._writer.close()


TraceSink: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(Sink)
"""`Sink` in an actor. Its calls run one by one, in the order in which the recorder made them."""


class RemoteRecorder:
    """Writes traces through a `TraceSink`. Implements `rollout.backend.Recorder`; a table never enters this process.

    >>> recorder = RemoteRecorder("/data/traces", spec)
    >>> recorder.write(finished, step=0); recorder.commit(0)

    Raises:
        SinkDiedError: when the sink's process died; what was committed before is intact.
        ValueError: after `close`.
        Exception: what the writer raised, in its own type and words. A write's error comes with the next write of its
            step that finds it, and with the commit.
    """

    def __init__(
        self,
        root: str | Path,
        spec: RoutingSpec,
        outstanding_writes: int = OUTSTANDING_WRITES,
        frozen_recompute: bool = True,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self._root, self._bound = str(root), outstanding_writes
        self._lock = threading.Lock()
        self._closed = False
        self._running: list[Any] = []
        self._writes: defaultdict[int, list[Any]] = defaultdict(list)
        where = TraceSink.options(scheduling_strategy=_this_node())
        self._sink = where.remote(self._root, spec, frozen_recompute, run)
        self._call("open")

    def committed_steps(self) -> list[int]:
        """Steps that readers can see, ascending."""
        return self._call("committed_steps")

    def write(self, finished: Finished, step: int, rewards: dict[str, float] | None = None) -> None:
        """Send a reference to the sink; waits while `outstanding_writes` are not done yet.

        Raises what an earlier write of `step` met, a full disk for example: more samples would be wasted.
        """
        self._check_open()
        table = ray.put(finished.table()) if finished.ref is None else finished.ref
        with self._lock:
            self._check_done(step)
            if len(self._running) >= self._bound:
                _, self._running = ray.wait(self._running, num_returns=1)
            write = self._sink.write.remote(table, step, rewards)
            self._running.append(write)
            self._writes[step].append(write)

    def commit(self, step: int) -> bool:
        """Wait for the writes of `step`, then make them visible. A step with a failed write is never committed."""
        with self._lock:
            writes = list(self._writes[step])
        for write in writes:
            self._fetch(write)
        committed = self._call("commit", step)
        self._forget(step)
        return committed

    def abandon(self, step: int) -> None:
        """Drop what was staged for `step`, failed writes too. `close` has done so already."""
        if not self._closed:
            self._call("abandon", step)
            self._forget(step)

    def close(self) -> None:
        """Abandon all that was not committed and stop the sink; fine when it is dead already, or closed."""
        if self._closed:
            return
        try:
            self._call("close")
        except SinkDiedError as error:
            logger.warning("%s", error)
        self._closed = True
        ray.kill(self._sink)

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

    def _forget(self, step: int) -> None:
        with self._lock:
            self._writes.pop(step, None)

    def _call(self, method: str, *args: Any) -> Any:
        self._check_open()
        return self._fetch(getattr(self._sink, method).remote(*args))

    def _fetch(self, ref: Any) -> Any:
        try:
            return fetch(ref)
        except DEAD as error:
            self._check_open()
            raise SinkDiedError(
                f"the actor that writes {self._root} died ({first_line(error)}). Committed steps are intact; open the "
                "dataset again and repeat the steps that were not committed"
            ) from error


def _this_node() -> NodeAffinitySchedulingStrategy:
    """Where the caller runs: a local path then means the same to both."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
