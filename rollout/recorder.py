"""Write traces from this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout.backend import Finished
from storage.promises import Promises
from storage.trace import RoutingSpec, Trace
from storage.writer import TraceWriter

ROW_GROUP_SAMPLES = 16


def _snapshot(trace: Trace, reward: float | None) -> Trace:
    """The trace as it is now: the caller gets the original and may change it before it is encoded. Arrays are shared,
    they are read-only."""
    return replace(trace, reward=reward, metadata=deepcopy(trace.metadata), sampling_params=dict(trace.sampling_params))


class LocalRecorder:
    """A Recorder over a TraceWriter in this process. Traces are encoded some at a time, row group by row group."""

    def __init__(
        self,
        root: str | Path,
        spec: RoutingSpec,
        promises: Promises | None = None,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self._writer = TraceWriter(root, spec, promises=promises, run=run)
        self._pending: dict[int, list[Trace]] = {}
        self._staged: set[int] = set()
        self._lock = threading.Lock()

    def taken_steps(self) -> list[int]:
        """Steps that cannot be written."""
        return self._writer.taken_steps()

    def write(self, finished: Finished, step: int, rewards: dict[str, float] | None = None) -> None:
        """Stage traces; those that ended in an error are left out."""
        with self._lock:
            pending = self._pending.setdefault(step, [])
            for trace in finished.traces():
                if trace.finish_reason != "error":
                    pending.append(_snapshot(trace, (rewards or {}).get(trace.sample_id, trace.reward)))
            if len(pending) >= ROW_GROUP_SAMPLES:
                self._flush(step)

    def _flush(self, step: int) -> None:
        traces, self._pending[step] = self._pending[step], []
        if traces:
            self._writer.write(traces, step=step)
            self._staged.add(step)

    def commit(self, step: int) -> bool:
        """Make the step visible; False when no trace was staged."""
        with self._lock:
            if step in self._pending:
                self._flush(step)
                del self._pending[step]
            if step not in self._staged:
                return False
            self._writer.commit(step=step)
            self._staged.discard(step)
            return True

    def abandon(self, step: int) -> None:
        """Drop what was staged for the step."""
        with self._lock:
            self._pending.pop(step, None)
            if step in self._staged:
                self._staged.discard(step)
                self._writer.abandon(step)

    def close(self) -> None:
        """Abandon what was not committed."""
        self._writer.close()
