"""Graphs of the simulated device: kernels queued while one is recorded run when it is replayed, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable

from tests.sim.streams import Stream


class NotCapturableError(RuntimeError):
    """Something that a stream cannot do while it is recorded."""


class Recording:
    """Stands in for the stream while a graph is recorded: nothing runs.

    Memory freed while recording is given to later kernels of the same graph, so its reuse is a part of it.
    """

    def __init__(self) -> None:
        self.ops: list[tuple[str, Callable[[], None], float]] = []
        self.open = True

    def enqueue(self, name: str, run: Callable[[], None], cost: float = 0.0) -> None:
        if name.startswith("copy to "):
            raise NotCapturableError(
                f"{name} while a graph is recorded: the host's memory would be read at each replay"
            )
        if self.open:
            self.ops.append((name, run, cost))

    def synchronize(self) -> None:
        raise NotCapturableError("the host waits for the device while a graph is recorded")

    def record_event(self, event: object = None) -> None:
        raise NotCapturableError("an event of another stream's is recorded into a graph")


class Graph:
    """What `torch.cuda.CUDAGraph` is to the engine."""

    def __init__(self, current: Callable[[], Stream]) -> None:
        self._current = current
        self.recording = Recording()

    def replay(self) -> None:
        """Queue all its kernels again."""
        if self.recording.open or not self.recording.ops:
            raise RuntimeError("replay of a graph that was not recorded")
        stream = self._current()
        for op in self.recording.ops:
            stream.enqueue(*op)
