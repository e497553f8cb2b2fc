"""The rows of one request, from its first step to its end."""

from __future__ import annotations

import numpy as np

from storage.trace import RoutingSpec

MOST_LATE = 256  # rows of a request that wait to be put in place together


class RequestRoutes:
    """Rows of one request, filled strictly in order; a row that was never written cannot be read. Until it is sealed it
    belongs to one thread, readers too.

    >>> routes = RequestRoutes(spec=RoutingSpec.uniform(num_sites=1, num_experts=4, top_k=2), capacity=3)
    >>> routes.extend(0, np.array([[[3, 1]]], np.uint8)); routes.take().tolist()
    [[[3, 1]]]
    """

    def __init__(self, spec: RoutingSpec, capacity: int) -> None:
        self._rows = np.empty((capacity, *spec.row_shape), spec.dtype)  # absent: no reader gets past `_filled`
        self._one_row = (1, *spec.row_shape)
        self._late: list[bytes] = []  # the last rows, each of a decode, not yet in `_rows`
        self._filled = 0
        self._sealed: int | None = None

    @property
    def filled(self) -> int:
        """Rows written so far."""
        return self._filled

    def rows(self, start: int, end: int) -> np.ndarray:
        """Rows `[start, end)` that were written, a view."""
        self._settle()
        return self._rows[start : min(end, self._filled)]

    def extend(self, start: int, rows: np.ndarray, frozen: int = 0) -> None:
        """Write rows `[start, start + len(rows))`; `start` must be where the last call ended. Once sealed, rows that do
        not fit are dropped.

        Rows below position `frozen` were computed again under replay: they must be those of the first time.
        """
        if self._sealed is not None:
            rows = rows[: max(len(self._rows) - start, 0)] if start <= self._filled else rows[:0]
            if not len(rows):
                return
        if start < frozen:
            again = rows[: frozen - start]
            if not np.array_equal(again, self.rows(start, start + len(again))):
                raise RuntimeError(f"rows {start}..{start + len(again)} were computed again with other experts")
            start, rows = start + len(again), rows[len(again) :]
            if not len(rows):
                return
        if start != self._filled:
            raise RuntimeError(f"routes of positions {self._filled}..{start} are missing or doubled")
        if start + len(rows) > len(self._rows):
            raise ValueError(f"routes of positions {start}..{start + len(rows)}, there is room for {len(self._rows)}")
        if self._sealed is None and rows.shape == self._one_row and rows.dtype == self._rows.dtype:
            self._late.append(rows.tobytes())
        elif rows.shape[1:] != self._rows.shape[1:]:
            raise ValueError(f"routes of shape {rows.shape}, a row has {self._rows.shape[1:]}")
        else:
            self._settle()
            self._rows[start : start + len(rows)] = rows
        self._filled += len(rows)
        if len(self._late) == MOST_LATE:
            self._settle()

    def _settle(self) -> None:
        """Put the late rows to the others: many at once take a fraction of the time of one by one."""
        if self._late:
            late = np.frombuffer(b"".join(self._late), self._rows.dtype).reshape(-1, *self._rows.shape[1:])
            self._rows[self._filled - len(late) : self._filled] = late
            self._late.clear()

    def seal(self) -> None:
        """The request has ended: it has the rows of now, which any thread may take. Those of steps in flight serve only
        who copied its prefix."""
        self._settle()
        self._sealed = self._filled

    def take(self, limit: int | None = None) -> np.ndarray:
        """The first `limit` or all rows, `[rows, sites, K]`; a copy when the sequence ended early: no slack is kept."""
        self._settle()
        rows = self._rows[: self._filled if self._sealed is None else self._sealed][:limit]
        return rows if len(rows) == len(self._rows) else rows.copy()
