"""PartReader: one Parquet file of traces, all checksums verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from storage.archive import archive_schema, from_archive, is_archived, stored_names
from storage.columns import PER_TOKEN
from storage.errors import RESTORE, DamagedDataError, DatasetError, MissingDataError
from storage.filters import columns_with, may_match
from storage.row_groups import check_row_group
from storage.schema import check_same_spec, conform, from_table, spec_of, table_problems, trace_schema
from storage.store import Store
from storage.trace import RoutingSpec, Trace

SCAN_ROWS = 1024  # at most, in a batch; a row group of routes has 16


class PartReader:
    """Reads an open part file of a dataset with this spec; `url` is how messages name it. Leaving closes the file.

    Raises:
        DamagedDataError: naming the file, in every method, when it is cut short or altered.
        SpecMismatchError: when it holds traces of another model.
    """

    def __init__(self, file: Any, url: str, spec: RoutingSpec) -> None:
        self._file, self._url, self._spec = file, url, spec
        # Page headers are looked at in a local file only: in an object store each would be a request.
        self._pages = file if isinstance(file, pa.OSFile) else None
        with self._naming_the_file():
            try:
                self._parquet = pq.ParquetFile(file, page_checksum_verification=True)
                check_same_spec(spec_of(self._parquet.schema_arrow), spec, "the dataset")
                self.archived = is_archived(self._parquet.schema_arrow)
            except BaseException:
                file.close()
                raise

    @classmethod
    def open(cls, store: Store, name: str, spec: RoutingSpec) -> PartReader:
        """The part file `name`; MissingDataError when there is none."""
        return cls(open_part(store, name), store.url(name), spec)

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.close()
        self._file.close()

    @property
    def num_row_groups(self) -> int:
        """Row groups in the file."""
        return self._parquet.num_row_groups

    @property
    def num_rows(self) -> int:
        """Samples in the file."""
        return self._parquet.metadata.num_rows

    def row_group(self, group: int) -> pa.Table:
        """One row group."""
        with self._naming_the_file():
            check_row_group(self._parquet.metadata, group, file=self._pages)
            table = self._parquet.read_row_group(group, use_threads=False)
            return conform(from_archive(table, self._spec) if self.archived else table)

    def tables(self, start: int, stop: int) -> Iterator[pa.Table]:
        """Rows `[start, stop)`, one row group at a time."""
        if stop > self.num_rows:
            raise DamagedDataError(f"{self._url} has {self.num_rows} rows, its manifest speaks of row {stop - 1}")
        row = 0
        for group in range(self.num_row_groups):
            rows = self._parquet.metadata.row_group(group).num_rows
            first, last = max(start - row, 0), min(stop - row, rows)
            if first < last:
                yield self.row_group(group).slice(first, last - first)
            row += rows

    def traces(self, start: int, stop: int) -> Iterator[Trace]:
        """Rows `[start, stop)`, decoded; every sample's crc32 is checked. One row group is in memory."""
        for table in self.tables(start, stop):
            yield from self.decode(table)

    def batches(self, columns: Sequence[str], filter: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        """The rows that pass `filter`, some columns; row groups whose statistics exclude it are not read."""
        named = columns_with(columns, filter)
        if not self.archived or not set(PER_TOKEN) & set(named):
            yield from self._scan(trace_schema(self._spec), columns, filter)
            return
        late = filter if set(PER_TOKEN) & set(columns_with([], filter)) else None
        schema, chosen = archive_schema(self._spec), stored_names(named if late is not None else columns)
        for batch in self._scan(schema, chosen, None if late is not None else filter):
            with self._naming_the_file():
                table = from_archive(pa.table(batch), self._spec)
            yield from pads.dataset(table).scanner(columns=list(columns), filter=late).to_batches()

    def _scan(
        self, schema: pa.Schema, columns: Sequence[str], filter: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
        options = pads.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=False)
        with self._naming_the_file():
            fragment = pads.ParquetFileFormat(default_fragment_scan_options=options).make_fragment(self._file)
            groups = self._groups_with_matches(fragment, schema, filter)
            read = {*columns, *columns_with([], filter)}
            for group in groups:
                check_row_group(self._parquet.metadata, group, read, self._pages)
            scanner = fragment.subset(row_group_ids=groups).scanner(
                schema=schema,
                columns=list(columns),
                filter=filter,
                batch_size=SCAN_ROWS,
                batch_readahead=0,
                fragment_readahead=0,
                use_threads=False,
            )
            batches = scanner.to_batches()
        expected = pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)
        while (batch := self._next(batches, expected)) is not None:
            yield batch

    def _groups_with_matches(self, fragment: Any, schema: pa.Schema, filter: pc.Expression | None) -> list[int]:
        """Row groups that may hold a match. pyarrow makes nothing of statistics of a column that holds nulls: a group
        has no match where neither its nulls nor what lies between its least and greatest value can pass."""
        groups = [part.row_groups[0].id for part in fragment.split_by_row_group(filter, schema)]
        for name in columns_with([], filter):
            ranges = self._ranges(name, groups)
            if filter is not None and any(ranges):
                found = may_match(filter, name, ranges, schema)
                groups = [group for group, may in zip(groups, found, strict=True) if may]
        return groups

    def _ranges(self, name: str, groups: Sequence[int]) -> list[tuple[Any, Any] | None]:
        """The least and greatest value of a column in each of the row groups, where there are nulls beside them."""
        metadata = self._parquet.metadata
        paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        if name not in paths:
            return [None] * len(groups)
        found = [metadata.row_group(group).column(paths.index(name)).statistics for group in groups]
        return [(s.min, s.max) if s is not None and s.has_min_max and s.null_count else None for s in found]

    def problems(self) -> Iterator[str]:
        """What `storage.schema.table_problems` finds in each row group."""
        for group in range(self.num_row_groups):
            table = self.row_group(group)
            with self._naming_the_file():
                found = table_problems(table)
            yield from (f"{self._url}: {problem}" for problem in found)

    def decode(self, table: pa.Table) -> list[Trace]:
        """The traces of a table of this file; every sample's crc32 is checked."""
        with self._naming_the_file():
            return from_table(table, check_crc=True)

    def _next(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch | None:
        with self._naming_the_file():
            batch = next(batches, None)
            return None if batch is None else batch.cast(schema)  # a null where there can be none is damage

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except DatasetError as error:
            raise type(error)(f"{self._url}: {error}") from error
        except (OSError, ValueError, MemoryError, pa.ArrowException) as error:
            raise DamagedDataError(f"{self._url} is damaged ({error}); {RESTORE}") from error


def open_part(store: Store, name: str) -> Any:
    """The part file `name`, not looked into yet; MissingDataError when there is none."""
    try:
        return store.open(name)
    except FileNotFoundError as error:
        raise MissingDataError(f"{store.url(name)} is missing; {RESTORE}") from error
