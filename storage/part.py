"""One Parquet file of traces: PartWriter streams it to disk, PartReader reads it, all checksums on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DamagedDataError, DatasetError
from storage.manifest import PartFile
from storage.schema import check_same_spec, from_table, spec_of, table_problems
from storage.trace import RoutingSpec, Trace

ROW_GROUP_SAMPLES = 16
ROW_GROUP_BYTES = 32 << 20
_REPETITIVE = ("group_id", "step", "weight_version", "finish_reason", "stop_reason", "sampling_params")
_SMALL = ("sample_id", "group_id", "step", "weight_version", "finish_reason", "reward")


class PartWriter:
    """Writes `path` in row groups of at most 16 samples or about 32 MiB, buffering at most one row group."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.sample_ids: list[str] = []
        self._file = _DigestFile(path)
        self._pending = schema.empty_table()
        self._parquet = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=list(_REPETITIVE),
            write_statistics=list(_SMALL),
            write_page_checksum=True,
        )

    @property
    def bytes_written(self) -> int:
        """Bytes handed to the operating system so far."""
        return self._file.tell()

    def write(self, table: pa.Table) -> None:
        """Append samples; full row groups go to disk."""
        self.sample_ids += table.column("sample_id").to_pylist()
        self._pending = pa.concat_tables([self._pending, table])
        while len(self._pending) >= (rows := self._row_group_rows()):
            self._write_row_group(rows)

    def close(self) -> None:
        """Write the rest and the footer, and wait until the file is on disk."""
        if len(self._pending):
            self._write_row_group(len(self._pending))
        self._parquet.close()
        self._file.sync_and_close()

    def discard(self) -> None:
        """Stop writing; the file stays incomplete."""
        self._file.discard()
        self._parquet.close()

    def manifest_entry(self, name: str) -> PartFile:
        """The closed file as a manifest lists it, under `name`."""
        return PartFile(name, self._file.tell(), self._file.sha256, len(self.sample_ids), self.sample_ids)

    def _row_group_rows(self) -> int:
        per_sample = max(1, self._pending.nbytes // max(1, len(self._pending)))
        return max(1, min(ROW_GROUP_SAMPLES, ROW_GROUP_BYTES // per_sample))

    def _write_row_group(self, rows: int) -> None:
        self._parquet.write_table(self._pending.slice(0, rows), row_group_size=rows)
        self._pending = self._pending.slice(rows)


class _DigestFile:
    """Hashes what it writes. After `discard` it swallows the footer that pyarrow insists on writing."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115 (closed by sync_and_close or discard)
        self._hash = hashlib.sha256()
        self._bytes = 0
        self.closed = False

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def tell(self) -> int:
        return self._bytes

    def write(self, data: bytes) -> int:
        if not self._file.closed:
            self._file.write(data)
            self._hash.update(data)
        self._bytes += len(data)
        return len(data)

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def sync_and_close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def discard(self) -> None:
        with suppress(OSError):  # the unflushed bytes of a file that is thrown away
            self._file.close()


class PartReader:
    """Reads a part file of a dataset with this spec.

    Raises:
        DamagedDataError: naming the file, in every method, when it is missing, cut short or altered.
        SpecMismatchError: when it holds traces of another model.
    """

    def __init__(self, path: Path, spec: RoutingSpec) -> None:
        self._path = path
        with self._naming_the_file():
            self._parquet = pq.ParquetFile(path, page_checksum_verification=True)
            try:
                check_same_spec(spec_of(self._parquet.schema_arrow), spec, "the dataset")
            except BaseException:
                self._parquet.close()
                raise

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._parquet.close()

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
            return self._parquet.read_row_group(group, use_threads=False)

    def traces(self, group: int) -> list[Trace]:
        """One row group, decoded; every sample's crc32 is checked."""
        return self._decode(self.row_group(group))

    def trace(self, row: int) -> Trace:
        """One row, decoded; its crc32 is checked."""
        group = 0
        while row >= (rows := self._parquet.metadata.row_group(group).num_rows):
            row, group = row - rows, group + 1
        return self._decode(self.row_group(group).slice(row, 1))[0]

    def table(self, columns: Sequence[str]) -> pa.Table:
        """All rows of some columns."""
        with self._naming_the_file():
            return self._parquet.read(list(columns), use_threads=False)

    def problems(self) -> Iterator[str]:
        """What `storage.schema.table_problems` finds in each row group."""
        for group in range(self.num_row_groups):
            table = self.row_group(group)
            with self._naming_the_file():
                found = table_problems(table)
            yield from (f"{self._path}: {problem}" for problem in found)

    def _decode(self, table: pa.Table) -> list[Trace]:
        with self._naming_the_file():
            return from_table(table, check_crc=True)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except DatasetError as error:
            raise type(error)(f"{self._path}: {error}") from error
        except (OSError, ValueError, pa.ArrowException) as error:
            raise DamagedDataError(
                f"{self._path} is damaged ({error}); restore it, or remove its step and sample that again"
            ) from error
