"""The device as the engine sees it: work is queued in order on a stream, an event tells when it is done.

On a CPU the device is a worker thread with first-in-first-out semantics, so that the engine is written once, as for
an accelerator: launch, go on, wait for the event.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Event:
    """Completion of all work launched before it. An error in that work is raised by `synchronize`."""

    def __init__(self) -> None:
        self._done: Future[None] = Future()

    def query(self) -> bool:
        """True once the work is done; never waits."""
        return self._done.done()

    def synchronize(self) -> None:
        """Wait for the work; raises the error that stopped it."""
        self._done.result()

    def record(self, error: BaseException | None) -> None:
        """Called on the stream when it reaches this event."""
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class CpuStream:
    """A worker thread that runs launched functions in order, in inference mode, with its own compute threads.

    >>> stream = CpuStream(num_threads=1)
    >>> event = stream.launch(lambda: None)
    >>> event.synchronize(); stream.close()
    """

    device = torch.device("cpu")

    def __init__(self, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Event] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._thread = threading.Thread(target=self._run, name="moe-rollout-device", daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], None], event: Event | None = None) -> Event:
        """Queue `work` and return the event recorded right after it. A failure stays with its own event."""
        event = event or Event()
        self._queue.put((work, event))
        return event

    def run(self, work: Callable[[], None]) -> None:
        """Launch and wait."""
        self.launch(work).synchronize()

    def call(self, work: Callable[[], Result]) -> Result:
        """Launch, wait, and return what `work` returned."""
        results: list[Result] = []
        self.launch(lambda: results.append(work())).synchronize()
        return results[0]

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the host. On a CPU the same storage: callers pass snapshots that no later step writes."""
        return tensor

    def close(self) -> None:
        """Finish what was launched, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                work, event = item
                event.record(_error_of(work))


def _error_of(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except BaseException as error:  # handed to whoever waits for the event
        return error
    return None


def open_stream(device: str, num_threads: int) -> CpuStream:
    """The stream of a device.

    Raises:
        ValueError: for a device this engine cannot drive.
    """
    if device.partition(":")[0] != "cpu":
        raise ValueError(f"device {device!r} is not supported by this engine; use device='cpu'")
    return CpuStream(num_threads)
