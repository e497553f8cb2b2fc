"""Packs what is already finished into one Arrow table: big enough to travel well, never waiting for more."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import NamedTuple

import pyarrow as pa

from rollout.backend import FinishedStream
from storage.schema import to_table
from storage.trace import RoutingSpec, Trace

PACK_BYTES = 1 << 20
POLL_SECONDS = 0.05
TOKEN_BYTES = 16  # id, two logprobs and the offset of its row


class _End(NamedTuple):
    error: BaseException | None = None


def pack(
    stream: FinishedStream,
    spec: RoutingSpec,
    *,
    stopped: Callable[[], bool] = lambda: False,
    limit_bytes: int = PACK_BYTES,
) -> Generator[pa.Table, None, None]:
    """Yield tables of the traces that are finished by now; a table closes at the trace that reaches `limit_bytes`.

    Waits only while nothing is finished. Ends early once `stopped()`. Ending early aborts `stream`, and no other stream
    even if it samples the same requests. An error of the stream is raised after everything that finished before it was
    yielded.
    """
    pump = _Pump(stream)
    pump.start()
    end = None
    try:
        while end is None:
            traces, end = pump.take(limit_bytes, stopped)
            if traces:
                yield to_table(traces, spec)
        if end.error is not None:
            raise end.error
    finally:
        if pump.is_alive():
            pump.stop.set()
            stream.abort()


def trace_bytes(trace: Trace) -> int:
    """About what a trace takes in a table.

    >>> trace_bytes(trace)  # 6 tokens, 5 rows of 2 sites x 2 ids of one byte
    116
    """
    routes = 0 if trace.routed_experts is None else trace.routed_experts.nbytes
    return routes + TOKEN_BYTES * len(trace.token_ids)


class _Pump(threading.Thread):
    """Draws from the engine's stream in its own thread, so that the packer can see what else is finished."""

    def __init__(self, stream: FinishedStream) -> None:
        super().__init__(name="pack-traces", daemon=True)
        self.stop = threading.Event()
        self._stream = stream
        self._ready: queue.SimpleQueue[Trace | _End] = queue.SimpleQueue()

    def run(self) -> None:
        """Forward traces until the stream ends, fails (the error is forwarded) or `stop` is set."""
        try:
            for finished in self._stream:
                for trace in finished.traces():
                    self._ready.put(trace)
                if self.stop.is_set():
                    self._stream.close()
        except BaseException as error:  # raised again by pack()
            self._ready.put(_End(error))
        else:
            self._ready.put(_End())

    def take(self, limit_bytes: int, stopped: Callable[[], bool]) -> tuple[list[Trace], _End | None]:
        """Wait for one trace, then add those that are there already; and how the stream ended, if it did."""
        traces: list[Trace] = []
        item, size = self._wait(stopped), 0
        while isinstance(item, Trace):
            traces.append(item)
            size += trace_bytes(item)
            if size >= limit_bytes or self._ready.empty():
                return traces, None
            item = self._ready.get()
        return traces, item

    def _wait(self, stopped: Callable[[], bool]) -> Trace | _End:
        while not stopped():
            try:
                return self._ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return _End()
