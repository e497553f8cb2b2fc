"""Decode steps as recorded CUDA graphs: one per batch size and length of the key table, replayed with a single call.

A step in which every request computes one token is padded to the next recorded batch size, and its attention reads a
table of the next power of two of keys per request (see attention_plan.DecodeTable), so that its shapes depend on these
two numbers alone. The routers' hooks wrote into the capture buffer while the forward was recorded: a replay writes
there too. Rows of padding lie behind the real ones, have a slot of their own, and are left out of logits and routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rollout.attention_plan import Span
from rollout.capture import RoutedExpertsCapturer

MIN_LENGTH = 64

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[[Tensors], torch.Tensor]


class Bucket(NamedTuple):
    """Shape of a decode step: `rows` of the batch, and `length`, the keys that its table has for each of them."""

    rows: int
    length: int


def batch_sizes(sizes: Sequence[int] | None, max_running_requests: int) -> tuple[int, ...]:
    """The given sizes, or powers of two up to the largest batch, and that.

    >>> batch_sizes(None, max_running_requests=12)
    (1, 2, 4, 8, 12)
    """
    if sizes is not None:
        return tuple(sorted(set(sizes)))
    powers = (1 << i for i in range(max_running_requests.bit_length()))
    return tuple(sorted({*powers, max_running_requests}))


@dataclass(frozen=True)
class Buckets:
    """Which steps have a static shape, and which one.

    Args:
        sizes: batch sizes, ascending; a larger batch runs without a graph.

    >>> buckets = Buckets(sizes=(1, 4))
    >>> buckets.choose([Span(0, 1, slot=0, kv_len=70, capacity=90), Span(1, 2, slot=90, kv_len=3, capacity=20)])
    Bucket(rows=4, length=128)
    """

    sizes: tuple[int, ...]

    def choose(self, spans: Sequence[Span]) -> Bucket | None:
        """The bucket of a step of one token per request; None for any other step."""
        rows = next((size for size in self.sizes if size >= len(spans)), None)
        if rows is None or any(span.end - span.start != 1 for span in spans):
            return None
        longest = max(span.kv_len for span in spans)
        return Bucket(rows, max(MIN_LENGTH, 1 << (longest - 1).bit_length()))


@dataclass
class _Recorded:
    """A graph, the tensors that it reads and writes, and which hooks fired while it was recorded."""

    graph: Any
    inputs: Tensors
    output: torch.Tensor
    writes: list[tuple[int, int]] = field(default_factory=list)


class GraphRunner:
    """Records a forward the first time that its shape comes up, and replays it from then on.

    The first time costs a forward without a graph, which loads kernels and workspaces, and the recording. Graphs share
    one memory pool: only one of them runs at a time, and its output is read before the next one begins.

    Args:
        api: `torch.cuda`, or a module with its `CUDAGraph`, `graph` and `graph_pool_handle`.
        stream: the stream of `api` on which steps are launched.
        capturer: whose hooks are part of the forward.
    """

    def __init__(self, api: Any, stream: Any, capturer: RoutedExpertsCapturer | None) -> None:
        self.replays = 0
        self._api = api
        self._stream = stream
        self._capturer = capturer
        self._pool = api.graph_pool_handle()
        self._recorded: dict[Bucket, _Recorded] = {}

    def run(self, bucket: Bucket, inputs: Tensors, forward: Forward) -> torch.Tensor:
        """`forward(inputs)`, `[bucket.rows, ...]`; valid until the next call. Called on the stream.

        Args:
            inputs: tensors on the device, whose shapes and dtypes `bucket` decides.
            forward: reads its arguments, and otherwise what stays in place: weights, the key/value pool.

        Raises:
            RuntimeError: the forward waits for the device, or does something else that a graph cannot hold.
        """
        recorded = self._recorded.get(bucket)
        if recorded is None:
            recorded = self._recorded[bucket] = self._record(inputs, forward)
        else:
            for static, given in zip(recorded.inputs, inputs, strict=True):
                static.copy_(given)
        recorded.graph.replay()
        self.replays += 1
        if self._capturer is not None:
            self._capturer.repeated(recorded.writes)
        return recorded.output

    def clear(self) -> None:
        """Forget all graphs: what they read has moved."""
        self._recorded.clear()

    def _record(self, inputs: Tensors, forward: Forward) -> _Recorded:
        static = tuple(tensor.clone() for tensor in inputs)
        forward(static)
        if self._capturer is not None:
            self._capturer.on_forward_begin()
        graph = self._api.CUDAGraph()
        with self._api.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = forward(static)
        return _Recorded(graph, static, output, [] if self._capturer is None else self._capturer.writes())
