"""The device as the engine sees it: work is queued in order on a stream, an event tells when it is done.

On a CPU the device is a worker thread with first-in-first-out semantics; on an accelerator the kernels of a step queue
on a compute stream and its outputs come back over a copy stream. The engine is written once: launch, go on, wait for
the event. Whatever touches the device runs inside `launch`, `run` or `call`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

import torch

Result = TypeVar("Result")
MIN_BLOCK = 512
SWITCH_INTERVAL_S = 5e-4
FEW_TOKENS = 128


class Event:
    """Completion of all work launched before it. An error in that work is raised by `synchronize`."""

    def __init__(self) -> None:
        self._launched: Future[Any] = Future()
        self._lent: Callable[[], None] | None = None

    def query(self) -> bool:
        """True once the work is done; never waits."""
        if not self._launched.done():
            return False
        return self._launched.exception() is not None or (marker := self._launched.result()) is None or marker.query()

    def synchronize(self) -> None:
        """Wait for the work; raises the error that stopped it."""
        marker = self._launched.result()
        if marker is not None:
            marker.synchronize()

    def release(self) -> None:
        """The outputs of the work were read: the host memory that they lie in may be used again."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent()

    def record(
        self, error: BaseException | None, marker: Any = None, give_back: Callable[[], None] | None = None
    ) -> None:
        """Called on the stream when it reaches this event.

        Args:
            error: what stopped the work.
            marker: the accelerator's own event, recorded behind the queued kernels and copies.
            give_back: called by `release`.
        """
        self._lent = give_back
        if error is None:
            self._launched.set_result(marker)
        else:
            self._launched.set_exception(error)


class CpuStream:
    """A worker thread that runs launched functions in order, in inference mode, with its own compute threads.

    It lowers the interpreter's switch interval to 0.5 ms: with the default 5 ms, Python work on the host holds the
    thread up each time that it comes back from a kernel.

    Steps of few tokens may compute in fewer threads than others: torch's operations in them are short, and two threads
    then mostly wait for each other.

    >>> stream = CpuStream(num_threads=1)
    >>> event = stream.launch(lambda: None)
    >>> event.synchronize(); stream.close()
    """

    device = torch.device("cpu")

    def __init__(self, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], Event] | None] = queue.SimpleQueue()
        self._num_threads = self._few_threads = num_threads
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

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device: here the same one."""
        return tensor

    def set_num_threads(self, num_threads: int, few: int | None = None) -> None:
        """Compute with so many threads from the next step on, with `few` in steps of at most FEW_TOKENS tokens."""
        self._num_threads, self._few_threads = num_threads, few or num_threads

    def begin_step(self, tokens: int) -> None:
        """On the stream: set torch's threads for a step of so many tokens."""
        wanted = self._few_threads if tokens <= FEW_TOKENS else self._num_threads
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)

    def close(self) -> None:
        """Finish what was launched, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        with torch.inference_mode():
            while (item := self._queue.get()) is not None:
                work, event = item
                event.record(_error_of(work))


class PinnedBuffers:
    """Page-locked host memory, lent in blocks and lent again only when the event that a block came back with is done.

    With one step running and one being prepared, two blocks of each size take turns. Nothing here ever waits.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[tuple[torch.Tensor, Any]]] = defaultdict(deque)

    def take(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A block of bytes, and its beginning as a tensor of the shape and dtype of `like`."""
        size = max(MIN_BLOCK, 1 << (like.nbytes - 1).bit_length()) if like.nbytes else MIN_BLOCK
        free = self._free[size]
        reusable = bool(free) and free[0][1].query()
        block = free.popleft()[0] if reusable else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return block, block[: like.nbytes].view(like.dtype).view(like.shape)

    def give_back(self, blocks: list[torch.Tensor], event: Any) -> None:
        """Take blocks back that copies queued before `event` still read or write."""
        for block in blocks:
            self._free[len(block)].append((block, event))


class AcceleratorStream:
    """Runs launched functions at once on the calling thread: their kernels queue on a compute stream.

    Inputs come from, and outputs go to, page-locked memory, without waiting; outputs over a copy stream, so that the
    next step's kernels do not wait for them.

    Args:
        device: e.g. `torch.device("cuda:0")`.
        api: `torch.cuda`, or a module with its `Stream`, `Event` and `stream`.
    """

    def __init__(self, device: torch.device, api: Any) -> None:
        self.device = device
        self.api = api
        self.compute = api.Stream(device=device)
        self.copy = api.Stream(device=device)
        self._buffers = PinnedBuffers()
        self._staged: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def launch(self, work: Callable[[], None], event: Event | None = None) -> Event:
        """Queue the kernels of `work`; the event is recorded behind them and behind the copies of its outputs."""
        event = event or Event()
        with torch.inference_mode(), self.api.stream(self.compute):
            error = _error_of(work)
        self.copy.wait_stream(self.compute)
        marker = self.copy.record_event()
        self._buffers.give_back(self._staged, marker)
        outputs, self._staged, self._outputs = self._outputs, [], []
        event.record(error, marker, lambda: self._buffers.give_back(outputs, marker))
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
        """Start a copy to the host and return where it will be, once the event of the running launch is done.

        Callers pass snapshots that no later step writes, and call `Event.release` when they have read it.
        """
        tensor = tensor.contiguous()
        block, host = self._buffers.take(tensor)
        self._outputs.append(block)
        self.copy.wait_stream(self.compute)
        with self.api.stream(self.copy):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.copy)  # its memory is not for the next kernel before the copy has read it
        return host

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, copied without waiting; the given one may be changed at once."""
        block, staged = self._buffers.take(tensor)
        self._staged.append(block)
        return staged.copy_(tensor).to(self.device, non_blocking=True)

    def close(self) -> None:
        """Finish what was launched."""
        self.run(lambda: None)


Stream: TypeAlias = CpuStream | AcceleratorStream


def _error_of(work: Callable[[], None]) -> BaseException | None:
    try:
        work()
    except BaseException as error:  # handed to whoever waits for the event
        return error
    return None


def _no_cuda(environ: Mapping[str, str]) -> str:
    """Why torch has no GPU here, and what to do next."""
    if not torch.version.cuda:
        return "was built without CUDA; use device='cpu', or on a GPU machine: pip install --force-reinstall torch"
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "sees no GPU: CUDA_VISIBLE_DEVICES hides them; unset it, over Ray pass num_gpus=1, or use device='cpu'"
    return "finds no GPU; use device='cpu', or look with `nvidia-smi` whether the driver sees one"


def open_stream(device: str, num_threads: int) -> Stream:
    """The stream of a device: "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: for a device this engine cannot drive, or that is not there.
    """
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device {device!r} is not supported by this engine; use device='cpu', 'cuda' or 'cuda:0'")
    if kind == "cpu":
        return CpuStream(num_threads)
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: the installed torch {torch.__version__} {_no_cuda(os.environ)}")
    count = torch.cuda.device_count()
    if index and int(index) >= count:
        raise ValueError(f"device {device!r} does not exist: this machine has {count}, the last is 'cuda:{count - 1}'")
    return AcceleratorStream(torch.device("cuda", int(index) if index else torch.cuda.current_device()), torch.cuda)
