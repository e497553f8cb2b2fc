"""Packs what is already finished into one Arrow table: big enough to travel well, never waiting for more."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import NamedTuple

import pyarrow as pa

from rollout.backend import Finished

PACK_BYTES = 1 << 20
POLL_SECONDS = 0.05


class _End(NamedTuple):
    error: BaseException | None = None


def pack(
    stream: Generator[Finished, None, None],
    *,
    abort: Callable[[], None],
    stopped: Callable[[], bool] = lambda: False,
    limit_bytes: int = PACK_BYTES,
) -> Generator[pa.Table, None, None]:
    """Yield tables of the traces that are finished by now; a table closes at the trace that reaches `limit_bytes`.

    Waits only while nothing is finished. Ends early once `stopped()`. Ending early calls `abort`, since a generator
    that waits in another thread cannot be closed from here, and closes `stream` as soon as it answers. An error of the
    stream is raised after everything that finished before it was yielded.
    """
    pump = _Pump(stream)
    pump.start()
    end = None
    try:
        while end is None:
            tables, end = pump.take(limit_bytes, stopped)
            if tables:
                yield pa.concat_tables(tables).combine_chunks()
        if end.error is not None:
            raise end.error
    finally:
        if pump.is_alive():
            pump.stop.set()
            abort()


class _Pump(threading.Thread):
    """Draws from the engine's stream in its own thread, so that the packer can see what else is finished."""

    def __init__(self, stream: Generator[Finished, None, None]) -> None:
        super().__init__(name="pack-traces", daemon=True)
        self.stop = threading.Event()
        self._stream = stream
        self._ready: queue.SimpleQueue[pa.Table | _End] = queue.SimpleQueue()

    def run(self) -> None:
        """Forward tables until the stream ends, fails (the error is forwarded) or `stop` is set."""
        try:
            for finished in self._stream:
                self._ready.put(finished.table())
                if self.stop.is_set():
                    self._stream.close()
        except BaseException as error:  # raised again by pack()
            self._ready.put(_End(error))
        else:
            self._ready.put(_End())

    def take(self, limit_bytes: int, stopped: Callable[[], bool]) -> tuple[list[pa.Table], _End | None]:
        """Wait for one table, then add those that are there already; and how the stream ended, if it did."""
        tables, item, size = [], self._wait(stopped), 0
        while isinstance(item, pa.Table):
            tables.append(item)
            size += item.nbytes
            if size >= limit_bytes or self._ready.empty():
                return tables, None
            item = self._ready.get()
        return tables, item

    def _wait(self, stopped: Callable[[], bool]) -> pa.Table | _End:
        while not stopped():
            try:
                return self._ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        return _End()
