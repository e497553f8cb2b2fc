"""Routed experts on their way from the routers to a request: captured, copied, finalized, each exactly once.

The routers' hooks write into one device buffer. `on_forward_end` takes a *snapshot* of the step's rows, since the next
step overwrites the buffer (sglang#34319); `copy_to_cpu` runs before the step's copy event; `finalize` runs after it, in
step order, on every path (sglang#23885), and hands the rows to where they belong as noted at launch.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.device import Event, Stream
from rollout.kv_pool import lazy_zeros
from rollout.parallel import RankGroup
from rollout.request_routes import RequestRoutes
from rollout.router import watch
from storage.sites import find_routers
from storage.trace import RoutingSpec


class RouteSegment(NamedTuple):
    """Rows `[start, end)` of a step are positions `position...` of one request, which has those below `frozen`.

    Those between `frozen` and `position` are of another request, `source`, whose prefix it took over.
    """

    start: int
    end: int
    position: int
    routes: RequestRoutes
    sample_id: str = ""
    frozen: int = 0
    source: RequestRoutes | None = None


class RouteState(enum.Enum):
    """Life of a step's routes."""

    CAPTURED = "captured"
    COPYING = "copying"
    FINALIZED = "finalized"


class RoutedExpertsOutput:
    """The routes of one step.

    Args:
        out_cache_loc: int64 `[tokens]` on the host, the slot of each token.
        routed_experts: `[tokens, sites, K]` of the spec's dtype, a snapshot on the device.
        host_cache: optional `[slots, sites, K]` that also receives the rows, by slot.
        segments: which request each row belongs to, noted at launch.
        step: its number, for messages.
    """

    def __init__(
        self,
        out_cache_loc: torch.Tensor,
        routed_experts: torch.Tensor,
        host_cache: np.ndarray | None = None,
        segments: Sequence[RouteSegment] = (),
        step: int = -1,
    ) -> None:
        self.out_cache_loc = out_cache_loc
        self.routed_experts = routed_experts
        self.host_cache = host_cache
        self.segments = segments
        self.step = step
        self.state = RouteState.CAPTURED
        if len(routed_experts) != len(out_cache_loc):
            raise RuntimeError(f"{self._name()}: {len(routed_experts)} rows for {len(out_cache_loc)} tokens")
        self._copy_done: Event | None = None

    def copy_to_cpu(self, stream: Stream, copy_done: Event) -> None:
        """Start the copy to the host; `copy_done` is recorded after it."""
        self._advance(RouteState.CAPTURED, RouteState.COPYING)
        self.routed_experts = stream.to_host(self.routed_experts)
        self._copy_done = copy_done

    def finalize(self) -> None:
        """Hand the rows over. Raises RuntimeError when called twice, or before the copy is done."""
        if self._copy_done is None or not self._copy_done.query():
            raise RuntimeError(f"{self._name()} finalized in state {self.state.value} before their copy was done")
        self._advance(RouteState.COPYING, RouteState.FINALIZED)
        rows = self.routed_experts.numpy()
        if self.host_cache is not None:
            self.host_cache[self.out_cache_loc.numpy()] = rows
        for start, end, position, routes, _, frozen, source in self.segments:
            if source is not None:
                routes.extend(frozen, source.rows(frozen, position))
            routes.extend(position, rows[start:end], frozen)

    def _advance(self, before: RouteState, after: RouteState) -> None:
        if self.state is not before:
            raise RuntimeError(
                f"{self._name()} cannot become {after.value}: they are {self.state.value}, not {before.value}"
            )
        self.state = after

    def _name(self) -> str:
        return f"routes of step {self.step} (requests {[segment.sample_id for segment in self.segments]})"


class RoutedExpertsCapturer:
    """Hooks on every router of one model, writing ids into a device buffer `[max_batch_tokens, sites, K]`.

    Each forward must fire every hook once, in site order, with one row per token: a router that a fused kernel
    bypasses (vllm#44116) or that runs twice is an error, never a row of zeros. The forwards of one step write one
    behind the other. As one of the `ranks` of a group its buffer has room for the rows of all, when routers see those.
    """

    def __init__(self, model: Any, spec: RoutingSpec, max_batch_tokens: int, ranks: RankGroup | None = None) -> None:
        self.spec = spec
        self._ranks = ranks
        max_batch_tokens *= ranks.size if ranks is not None and ranks.layout == "allgather" else 1
        self._device = model.device
        self._dtype = torch.uint8 if spec.dtype.itemsize == 1 else torch.uint16
        self._buffer = torch.zeros((max_batch_tokens, *spec.row_shape), dtype=torch.int32, device=self._device)
        self._seen: list[tuple[int, int]] = []
        self._written = [0] * spec.num_sites
        self._places: tuple[int, int, list[torch.Tensor]] = (0, 0, [])
        self.seconds = 0.0  # of host time, for what is counted
        self.close = watch(model, find_routers(model), self._write)

    def _write(self, site: int, ids: torch.Tensor) -> None:
        begun, start, count = time.perf_counter(), self._written[site], len(ids)
        self._places_of(start, count)[site].copy_(ids)
        self._written[site] += count
        self._seen.append((site, count))
        self.seconds += time.perf_counter() - begun

    def _places_of(self, start: int, count: int) -> list[torch.Tensor]:
        """Where each site's ids of these rows go; the same for all sites, and from one decode step to the next."""
        if self._places[:2] != (start, count):
            rows, sites = self._buffer[start : start + count], enumerate(self.spec.sites)
            self._places = (start, count, [rows[:, index, : site.top_k] for index, site in sites])
        return self._places[2]

    @property
    def max_rows(self) -> int:
        """Rows of one step that there is room for."""
        return len(self._buffer)

    def on_forward_begin(self) -> None:
        """Start a step: forget which hooks fired; a step that failed half-way leaves nothing behind."""
        self._seen.clear()
        self._written = [0] * self.spec.num_sites

    def writes(self) -> list[tuple[int, int]]:
        """(site, rows) of each hook that fired since the step began."""
        return list(self._seen)

    def repeated(self, writes: Sequence[tuple[int, int]]) -> None:
        """A recorded forward ran again: the device wrote what these hooks had written, at the same places."""
        self._seen = list(writes)

    def reserve(self, rows: int) -> None:
        """Make room for steps of `rows` tokens."""
        if rows > self.max_rows:
            self._buffer = lazy_zeros((rows, *self.spec.row_shape), torch.int32, self._device)
            self._places = (0, 0, [])

    def on_forward_end(
        self,
        out_cache_loc: torch.Tensor,
        segments: Sequence[RouteSegment] = (),
        host_cache: np.ndarray | None = None,
        forwards: Sequence[int] | None = None,
        no_copy_to_cpu: bool = True,
        step: int = -1,
    ) -> RoutedExpertsOutput:
        """Snapshot this step's rows, one per slot in `out_cache_loc`; rows of padding behind them are left out.

        `forwards` are the rows of each forward of the step, with padding; by default one forward without padding.

        The narrowing cast is the copy. `no_copy_to_cpu=False` is refused: a copy here would stop the overlap.
        """
        if not no_copy_to_cpu:
            raise ValueError("routes are copied by GenerationBatchResult.copy_to_cpu, not at the end of the forward")
        begun, rows = time.perf_counter(), len(out_cache_loc)
        start, counts = 0, [rows] if forwards is None else list(forwards)
        if self._ranks is not None:
            start, counts = self._ranks.captured(rows, counts)
        if self._seen != [(index, count) for count in counts for index in range(self.spec.num_sites)]:
            raise RuntimeError(
                f"routers wrote (site, rows) {self._seen}, expected each of {self.spec.num_sites} sites once, in order "
                f"with {counts} rows; this model's routing cannot be recorded"
            )
        snapshot = self._buffer[start : start + rows].to(self._dtype)
        self.seconds += time.perf_counter() - begun
        return RoutedExpertsOutput(out_cache_loc, snapshot, host_cache, segments, step)
