"""One finished trace in memory, as the streams of engines in or behind this process yield it."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from storage.schema import to_table
from storage.trace import RoutingSpec, Trace


@dataclass(frozen=True)
class FinishedTrace:
    """Implements `rollout.backend.Finished`."""

    trace: Trace
    spec: RoutingSpec
    ref: None = None

    def traces(self) -> list[Trace]:
        """The trace."""
        return [self.trace]

    def table(self) -> pa.Table:
        """The trace as one row."""
        return to_table([self.trace], self.spec)
