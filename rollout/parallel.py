"""Data-parallel attention with expert parallelism: who holds which rows and experts, and the collectives of a step.

Each rank of a group has its own requests, scheduler and key/value pool; the experts are divided among the ranks.
Everything that shapes a step (token counts, slice bounds) is a Python int agreed over a CPU group before the step is
launched, so that no device scalar is ever read for it (sglang#30712).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

Layout = Literal["allgather", "alltoall"]


def get_dp_local_slice_cpu(
    global_num_tokens_cpu: Sequence[int] | None, dp_rank: int, can_run_graph: bool, graph_batch: int | None
) -> tuple[int, int]:
    """Where a rank's rows are in the batch of all ranks: `(start, length)`, Python ints.

    Under a graph every rank's part is padded to `graph_batch` rows; otherwise the parts lie one behind the other.

    >>> get_dp_local_slice_cpu([3, 0, 5], dp_rank=2, can_run_graph=False, graph_batch=None)
    (3, 5)
    >>> get_dp_local_slice_cpu([3, 0, 5], dp_rank=2, can_run_graph=True, graph_batch=8)
    (16, 5)

    Raises:
        ValueError: when the counts are missing, the graph batch is missing in graph mode (sglang#30712) or smaller than
            a count, or a value cannot be.
    """
    if global_num_tokens_cpu is None:
        raise ValueError("global_num_tokens_cpu is None: the ranks must agree on token counts before a step is sliced")
    counts = [int(count) for count in global_num_tokens_cpu]
    if not 0 <= dp_rank < len(counts):
        raise ValueError(f"dp_rank {dp_rank} is not in a group of {len(counts)} ranks")
    if min(counts) < 0:
        raise ValueError(f"global_num_tokens_cpu {counts} has a negative count")
    if not can_run_graph:
        return sum(counts[:dp_rank]), counts[dp_rank]
    if graph_batch is None:
        raise ValueError("graph_batch is None, but the step runs under a graph: every rank's part has that many rows")
    if max(counts) > graph_batch:
        raise ValueError(
            f"graph_batch {graph_batch} does not hold {max(counts)} tokens of global_num_tokens_cpu {counts}"
        )
    return dp_rank * graph_batch, counts[dp_rank]


@dataclass(frozen=True)
class StepShape:
    """What all ranks know of one step before it is launched.

    >>> shape = StepShape(num_tokens=(3, 0, 5), graph_batch=None)
    >>> shape.rows, shape.local_slice(2), shape.total_rows
    ((3, 1, 5), (4, 5), 9)

    Attributes:
        num_tokens: real tokens of each rank. A rank without any joins with one padded row.
        graph_batch: rows that every rank is padded to, None without a graph.
        padded: rows of each rank with its own padding, when it pads (batch-invariant mode); default `num_tokens`.
    """

    num_tokens: tuple[int, ...]
    graph_batch: int | None = None
    padded: tuple[int, ...] | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each rank's forward, with padding."""
        if self.graph_batch is not None:
            return (self.graph_batch,) * len(self.num_tokens)
        return tuple(max(count, 1) for count in self.padded or self.num_tokens)

    @property
    def total_rows(self) -> int:
        """Rows that a router sees when it sees all ranks."""
        return sum(self.rows)

    def local_slice(self, dp_rank: int) -> tuple[int, int]:
        """`(start, length)` of a rank's real tokens among the rows of all ranks."""
        graph = self.graph_batch is not None
        counts = self.num_tokens if graph else self.rows
        start, _ = get_dp_local_slice_cpu(counts, dp_rank, graph, self.graph_batch)
        return start, self.num_tokens[dp_rank]


class ExpertRange(NamedTuple):
    """Experts `[start, end)` of `num_experts` belong to one rank.

    >>> ExpertRange.of(rank=1, size=2, num_experts=8)
    ExpertRange(start=4, end=8, num_experts=8)
    """

    start: int
    end: int
    num_experts: int

    @classmethod
    def of(cls, rank: int, size: int, num_experts: int) -> ExpertRange:
        """Raises ValueError when `size` does not divide the experts."""
        if num_experts % size:
            fitting = [n for n in range(2, num_experts + 1) if num_experts % n == 0]
            raise ValueError(f"dp_size {size} does not divide {num_experts} experts; use one of {fitting}")
        each = num_experts // size
        return cls(rank * each, (rank + 1) * each, num_experts)


class CollectiveError(RuntimeError):
    """A collective did not complete: a rank died, stands still, or is at another step."""


class RankGroup:
    """The ranks of one group as a model's forward sees them.

    `shape` and `step` are set before each forward, on the thread that runs it. Collectives on tensors run over `group`,
    in the order of the forward; `seconds` adds up what they took, `graph_steps` counts steps padded as under a graph.

    Raises:
        CollectiveError: from any collective, naming rank, step and what it waited for.
    """

    def __init__(self, rank: int, size: int, layout: Layout, group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self.layout = layout
        self.step = -1
        self.seconds = 0.0
        self.graph_steps = 0
        self.shape = StepShape((1,) * size)
        self._group = group

    def begin(self, step: int, shape: StepShape) -> None:
        """The next forward is of this shape."""
        self.step, self.shape = step, shape
        self.graph_steps += shape.graph_batch is not None

    def all_gather_rows(self, rows: torch.Tensor, what: str) -> torch.Tensor:
        """The rows `[rows, ...]` of every rank, one behind the other; parts are padded to the largest on the way."""
        counts = self.shape.rows
        if len(rows) != counts[self.rank]:
            raise ValueError(f"rank {self.rank} has {len(rows)} rows in step {self.step}, but agreed on {counts}")
        largest = max(counts)
        sent = rows.new_zeros((largest, *rows.shape[1:]))
        sent[: len(rows)] = rows
        got = rows.new_empty((self.size * largest, *rows.shape[1:]))
        self._wait(what, lambda: dist.all_gather(list(got.chunk(self.size)), sent, group=self._group, async_op=True))
        if largest * self.size == sum(counts):
            return got
        return torch.cat([part[:count] for part, count in zip(got.split(largest), counts, strict=True)])

    def all_to_all_rows(
        self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> list[torch.Tensor]:
        """Send `sent[r]` consecutive rows to each rank r; what came from each rank, in the order of ranks."""
        got = rows.new_empty((sum(received), *rows.shape[1:]))
        self._wait(
            what,
            lambda: dist.all_to_all_single(
                got, rows.contiguous(), list(received), list(sent), group=self._group, async_op=True
            ),
        )
        return list(got.split(list(received)))

    def exchange_counts(self, counts: Sequence[int], what: str) -> list[int]:
        """One integer to each rank, one from each rank."""
        got = torch.empty(self.size, dtype=torch.int64)
        sent = torch.tensor(list(counts), dtype=torch.int64)
        self._wait(what, lambda: dist.all_to_all_single(got, sent, group=self._group, async_op=True))
        return [int(count) for count in got.tolist()]

    def all_gather_ints(self, values: Sequence[int], what: str) -> list[list[int]]:
        """As many integers of every rank as this one gives, in the order of ranks."""
        sent = torch.tensor([int(value) for value in values], dtype=torch.int64)
        got = torch.empty(self.size * len(sent), dtype=torch.int64)
        self._wait(what, lambda: dist.all_gather(list(got.chunk(self.size)), sent, group=self._group, async_op=True))
        return got.view(self.size, -1).tolist()

    def captured(self, rows: int, forwards: list[int]) -> tuple[int, list[int]]:
        """Where this rank's `rows` rows begin among those that its routers see, and the rows that these see.

        Raises:
            ValueError: the step has another number of rows than the ranks agreed on.
        """
        start, length = self.shape.local_slice(self.rank)
        if rows != length or forwards != [self.shape.rows[self.rank]]:
            raise ValueError(
                f"rank {self.rank} has {rows} tokens in forwards of {forwards} rows in step {self.step}, but the ranks "
                f"agreed on {self.shape}"
            )
        return (start, [self.shape.total_rows]) if self.layout == "allgather" else (0, forwards)

    def _wait(self, what: str, start: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        try:
            start().wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.size}, step {self.step}: {what} did not complete ({error}); "
                "a rank of the group died, stands still or is at another step"
            ) from error
        self.seconds += time.perf_counter() - begun


def join_group(rank: int, size: int, init_method: str, timeout_s: float) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Join `size` ranks at `init_method`, e.g. `tcp://127.0.0.1:29500` or `file:///tmp/rendezvous`.

    Two gloo groups of all ranks come back: one for the forwards, one for what is agreed between them.

    Raises:
        CollectiveError: not all ranks came within `timeout_s` seconds, each time that they meet.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise CollectiveError(
            f"rank {rank} of {size} waited {timeout_s:g} s for the others at {init_method}: {error}"
        ) from error
    group = dist.group.WORLD
    assert group is not None
    return group, control
