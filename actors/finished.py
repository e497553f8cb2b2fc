"""Finished traces that stay in Ray's object store until somebody looks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import ray

from actors.remote import fetch
from rollout.backend import SampleRequest
from rollout.start import untouched
from storage.schema import from_table, to_table
from storage.trace import RoutingSpec, Trace


class RemoteFinished:
    """A reference to one table of finished traces, and which samples it holds.

    >>> finished.sample_ids
    ('run/0/0-0/0', 'run/0/0-0/1')
    """

    def __init__(self, ref: Any, sample_ids: Sequence[str]) -> None:
        self.ref = ref
        self.sample_ids = tuple(sample_ids)

    @cached_property
    def _table(self) -> pa.Table:
        return fetch(self.ref)

    def table(self) -> pa.Table:
        """The traces in the dataset's schema, a zero-copy view of the object store; fetched on first use."""
        return self._table

    def traces(self) -> list[Trace]:
        """The traces, always the same objects; their routes are read-only views of the object store."""
        return self._traces

    @cached_property
    def _traces(self) -> list[Trace]:
        return from_table(self.table())

    def only(self, sample_ids: Sequence[str]) -> RemoteFinished:
        """The part that holds `sample_ids`, as an object of its own."""
        keep = pa.array([sample_id in set(sample_ids) for sample_id in self.sample_ids])
        return RemoteFinished(ray.put(self.table().filter(keep)), sample_ids)


def aborted(requests: Sequence[SampleRequest], spec: RoutingSpec) -> RemoteFinished:
    """What a stopped backend answers for requests it never began: what they had before, finish_reason "abort"."""
    traces = [untouched(request) for request in requests]
    return RemoteFinished(ray.put(to_table(traces, spec)), [trace.sample_id for trace in traces])
