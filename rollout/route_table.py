"""Find a sequence's routes by its tokens: for trainers that shuffle, split and pad batches in code we do not own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from rollout.distinct import check_distinct
from rollout.replay_rows import Rows
from storage.trace import RoutingSpec, Trace

Duplicates = Literal["error", "first"]


class _Recorded(NamedTuple):
    trace: Trace
    ids: np.ndarray

    def same_routes(self, other: _Recorded) -> bool:
        valid = [
            np.ones(len(found.ids), bool) if (v := found.trace.route_valid) is None else v for found in (self, other)
        ]
        return (
            self.trace.route_start == other.trace.route_start
            and np.array_equal(self.ids, other.ids)
            and np.array_equal(valid[0], valid[1])
        )


class RouteTable:
    """Routes by token ids. Traces may be added at any time, also while a `RouterReplay.lookup` is open.

    A row of a batch is found when its tokens are those of a trace. The last token, which was never an input of the
    rollout, keeps the native choice.

    >>> table = RouteTable(replay.spec)
    >>> table.add(traces)
    >>> with replay.lookup(table):
    ...     trainer.training_step(model, inputs)

    Args:
        spec: the sites of the model.
        without_last: the trainer forwards `token_ids[:-1]`, not whole sequences.
        duplicates: of two traces with the same tokens and other routes, which a low-precision sampler makes: "error",
            or "first" to take the first added, a path that one of the samples did take.
    """

    def __init__(self, spec: RoutingSpec, *, without_last: bool = False, duplicates: Duplicates = "error") -> None:
        if duplicates not in ("error", "first"):
            raise ValueError(f"duplicates is {duplicates!r}, need 'error' or 'first'")
        self.spec = spec
        self._without_last = without_last
        self._duplicates = duplicates
        self._traces: dict[bytes, _Recorded] = {}

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, traces: Iterable[Trace]) -> None:
        """Raises ValueError, naming the sample, for a trace without routes or of another spec, or a duplicate."""
        for trace in traces:
            if trace.routed_experts is None or not trace.route_len:
                raise ValueError(f"trace {trace.sample_id!r} has no routes to look up")
            name = f"trace {trace.sample_id!r}"
            ids = self.spec.check_routes(trace.routed_experts, name=name)
            check_distinct(self.spec, ids, trace.route_valid, f"{name}, row {{}},".format)
            self._add(_Recorded(trace, ids))

    def _add(self, found: _Recorded) -> None:
        tokens = found.trace.token_ids[:-1] if self._without_last else found.trace.token_ids
        known = self._traces.setdefault(_key(tokens), found)
        if self._duplicates == "error" and not known.same_routes(found):
            raise ValueError(
                f"traces {known.trace.sample_id!r} and {found.trace.sample_id!r} have the same tokens and other "
                "routes; duplicates='first' takes the first"
            )

    def clear(self) -> None:
        """Forget all traces, e.g. after the weights changed."""
        self._traces.clear()

    def rows(self, args: Any, kwargs: Any) -> Rows:
        """The rows of a forward, from its `input_ids` and `attention_mask`, `[B, S]`.

        Raises:
            ValueError: for a row whose tokens are those of no trace, with its index.
        """
        input_ids = args[0] if args else kwargs.get("input_ids")
        if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
            raise ValueError("lookup finds routes by token ids: call the model with input_ids [B, S]")
        mask = kwargs.get("attention_mask")
        host = input_ids.cpu().numpy()
        tokens = np.ones(host.shape, bool) if mask is None else _as_mask(mask, host.shape)
        ids = np.zeros((*host.shape, *self.spec.row_shape), self.spec.dtype)
        forced = np.zeros(host.shape, bool)
        for row in range(len(host)):
            self._fill(row, host[row], tokens[row], ids[row], forced[row])
        parts = ids.reshape(-1, *self.spec.row_shape), forced.reshape(-1), forced.reshape(-1), tokens.reshape(-1)
        return Rows(*(torch.from_numpy(part).to(input_ids.device) for part in parts))

    def _fill(self, row: int, host: np.ndarray, tokens: np.ndarray, ids: np.ndarray, forced: np.ndarray) -> None:
        columns = np.flatnonzero(tokens)
        if not len(columns):
            return
        found = self._traces.get(_key(host[columns]))
        if found is None:
            raise ValueError(
                f"row {row} of the batch, {len(columns)} tokens that start {host[columns][:8].tolist()}, is none of "
                f"the {len(self)} traces in the table; add its trace, or forward it outside of the lookup"
            )
        recorded = columns[found.trace.route_start : found.trace.route_start + len(found.ids)]
        ids[recorded] = found.ids
        forced[recorded] = True if found.trace.route_valid is None else found.trace.route_valid


def _key(tokens: Any) -> bytes:
    return np.ascontiguousarray(tokens, dtype=np.int64).tobytes()


def _as_mask(mask: torch.Tensor, shape: tuple[int, ...]) -> np.ndarray:
    if mask.shape != shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {shape}; lookup needs [B, S]")
    return mask.cpu().numpy().astype(bool)


def table_of(source: RouteTable | Iterable[Trace], spec: RoutingSpec) -> RouteTable:
    """The table itself, or one of these traces."""
    if isinstance(source, RouteTable):
        return source
    table = RouteTable(spec)
    table.add(source)
    return table
