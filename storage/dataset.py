"""TraceDataset: read committed steps, checking page checksums and the crc32 of every decoded sample.

Committed steps never change, so reading needs no lock and is safe while writers commit; `refresh()`
shows newer steps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from storage.errors import DamagedDataError
from storage.manifest import Manifest, committed_steps, read_manifest, read_spec, step_directory
from storage.part import PartReader
from storage.schema import COLUMNS, trace_schema
from storage.trace import RoutingSpec, Trace
from storage.verify import verify_dataset


class _Place(NamedTuple):
    path: Path
    row: int


class TraceDataset:
    """The committed traces under `root`.

    >>> ds = TraceDataset("traces/")
    >>> len(ds), ds.steps, "run/0/0-0/1" in ds
    (400, [0, 1], True)
    >>> ds["run/0/0-0/1"].routed_experts.shape           # [rows, sites, K], a read-only view
    (11, 8, 2)
    >>> sum(trace.reward for trace in ds.iter(step=1))   # one row group in memory at a time
    37.0

    Raises:
        FileNotFoundError: when there is no dataset at `root`.
        FormatVersionError: when another release wrote it.
        DamagedDataError: naming the file, here or later, when it is missing, cut short or altered.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._spec = read_spec(self.root)
        self._manifests: dict[int, Manifest] = {}
        self.refresh()

    def refresh(self) -> None:
        """See the steps that were committed since."""
        self._steps = committed_steps(self.root)
        self._places: dict[str, _Place] | None = None  # built on first use

    @property
    def spec(self) -> RoutingSpec:
        """The routers whose choices were recorded."""
        return self._spec

    @property
    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        return list(self._steps)

    def __len__(self) -> int:
        """Number of samples."""
        return sum(len(self._manifest(step).sample_ids) for step in self._steps)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._index()

    def __getitem__(self, sample_id: str) -> Trace:
        """The trace of `sample_id`; KeyError when there is none."""
        place = self._index().get(sample_id)
        if place is None:
            raise KeyError(f"{sample_id!r} is not among the {len(self)} samples of {self.root}")
        with PartReader(place.path, self._spec) as part:
            if place.row >= part.num_rows:
                raise DamagedDataError(f"{place.path} ends before row {place.row}, where {sample_id!r} should be")
            trace = part.trace(place.row)
        if trace.sample_id != sample_id:
            raise DamagedDataError(f"{place.path} row {place.row} is {trace.sample_id!r}, not {sample_id!r}")
        return trace

    def __iter__(self) -> Iterator[Trace]:
        return self.iter()

    def iter(self, step: int | None = None) -> Iterator[Trace]:
        """Traces of one step or of all, as written; one row group (at most 16 samples) is in memory."""
        for path in self._paths(step):
            with PartReader(path, self._spec) as part:
                for group in range(part.num_row_groups):
                    yield from part.traces(group)

    def to_arrow(self, step: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """One step or all as one table; `columns` picks some of `storage.schema.COLUMNS`.

        >>> ds.to_arrow(step=0, columns=["sample_id", "reward"]).num_rows
        200
        """
        schema = trace_schema(self._spec)
        if unknown := set(columns or ()) - set(COLUMNS):
            raise ValueError(f"no such columns: {sorted(unknown)}; a trace has {list(COLUMNS)}")
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)
        tables = [schema.empty_table()]
        for path in self._paths(step):
            with PartReader(path, self._spec) as part:
                tables.append(part.table(schema.names))
        return pa.concat_tables(tables)

    def verify(self) -> list[str]:
        """Every problem found by `storage.verify.verify_dataset`; empty when the dataset is sound."""
        return verify_dataset(self.root)

    def _manifest(self, step: int) -> Manifest:
        if step not in self._manifests:
            self._manifests[step] = read_manifest(self.root, step)
        return self._manifests[step]

    def _paths(self, step: int | None) -> list[Path]:
        if step is not None and step not in self._steps:
            raise ValueError(f"step {step} is not committed in {self.root}; committed: {self._steps}")
        steps = self._steps if step is None else [step]
        return [step_directory(self.root, s) / file.path for s in steps for file in self._manifest(s).files]

    def _index(self) -> dict[str, _Place]:
        if self._places is None:
            self._places = {
                sample_id: _Place(step_directory(self.root, step) / file.path, row)
                for step in self._steps
                for file in self._manifest(step).files
                for row, sample_id in enumerate(file.sample_ids)
            }
        return self._places
