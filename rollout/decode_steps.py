"""Most steps are decodes of the same requests as in the step before: their inputs are those, one position further.

That computes for less than a third of the time that planning a step from its requests does (tests/bench/bench_prepare).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from rollout.attention_plan import AttentionBatch, Span
from rollout.forward_batch import ForwardBatch, route_segments
from rollout.rng import uniforms
from rollout.scheduler import Work

Place = tuple[int, int, int, int]


class DecodeStep(NamedTuple):
    """A step whose every token is a decode that draws the next one, as the step after it needs it: no request is kept.

    `places`: (arrival, row, first slot, position) of each of its requests, one position further. `keys` uint64 and
    `drawn` int64 `[requests]`: of their streams of random numbers. `forward` has neither spans nor segments.
    """

    places: list[Place]
    keys: np.ndarray
    drawn: np.ndarray
    forward: ForwardBatch

    @classmethod
    def of(cls, batch: list[Work], forward: ForwardBatch) -> DecodeStep | None:
        """None when the next step has to be planned from its requests."""
        plain = forward.edits is None and not forward.top and not forward.prompts and forward.forced is None
        if not plain or forward.attention.native is None or forward.attention.spans:
            return None
        if len(forward.decode_rows) != len(batch) or len(forward.sample_rows) != len(batch):
            return None
        keys = np.array([work.request.random_key for work in batch], np.uint64)
        drawn = np.array([work.drawn for work in batch])
        return cls(_places(batch, further=1), keys, drawn, replace(forward, spans=[], segments=[]))

    def next(self, batch: list[Work], rows: int | None) -> tuple[ForwardBatch, DecodeStep] | None:
        """The step behind this one, and what the one behind that needs; None when `batch` is not that step. `rows` as
        in `ModelRunner.prepare`."""
        if not self._precedes(batch, rows):
            return None
        before = self.forward
        assert before.sampling is not None
        count, drawn, slots = len(batch), self.drawn + 1, before.slots + 1
        positions = before.position_ids.clone()
        positions[:count] += 1
        spans = [
            Span(i, i + 1, work.request.slot, work.start + 1, work.request.capacity) for i, work in enumerate(batch)
        ]
        uniform = torch.from_numpy(uniforms(self.keys, drawn))
        forward = replace(
            before,
            input_ids=torch.zeros_like(before.input_ids),  # the step writes into it
            position_ids=positions,
            slots=slots,
            attention=_further(before.attention, slots),
            sampling=replace(before.sampling, uniform=uniform),
        )
        after = DecodeStep(_places(batch, further=1), self.keys, drawn, forward)
        return replace(forward, spans=spans, segments=route_segments(batch, spans)), after

    def _precedes(self, batch: list[Work], rows: int | None) -> bool:
        """Whether `batch` is this step one position further, in as many rows."""
        if len(batch) != len(self.places) or (rows is not None and rows != len(self.forward.input_ids)):
            return False
        return _places(batch) == self.places and all(work.is_decode and work.samples for work in batch)


def _places(batch: list[Work], further: int = 0) -> list[Place]:
    return [(w.request.arrival, w.request.row, w.request.slot, w.start + further) for w in batch]


def _further(attention: AttentionBatch, slots: torch.Tensor) -> AttentionBatch:
    native = attention.native
    assert native is not None
    return replace(
        attention, out_cache_loc=slots, native=native._replace(kv_lens=native.kv_lens + 1, by_reach={}), _masks={}
    )
