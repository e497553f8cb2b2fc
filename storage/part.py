"""PartWriter: traces to one Parquet file, row group by row group, all checksums on."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from storage.manifest import PartFile
from storage.row_groups import ONE_SAMPLE_BYTES, ROW_GROUP_SAMPLES

Compression = Literal["zstd", "none"]
ROW_GROUP_BYTES = 32 << 20
_REPETITIVE = ("group_id", "step", "weight_version", "finish_reason", "stop_reason", "sampling_params")
_SMALL = ("sample_id", "group_id", "step", "weight_version", "finish_reason", "reward")


class PartWriter:
    """Writes `file` in row groups of at most 16 samples or about 32 MiB, buffering at most one row group."""

    def __init__(self, file: DigestFile, schema: pa.Schema, compression: Compression = "zstd", level: int = 1) -> None:
        self.sample_ids: list[str] = []
        self._file = file
        self._pending = schema.empty_table()
        self._pending_bytes = 0
        self._parquet = pq.ParquetWriter(
            self._file,
            schema,
            compression=compression,
            compression_level=level if compression == "zstd" else None,
            use_dictionary=list(_REPETITIVE),
            write_statistics=list(_SMALL),
            write_page_checksum=True,
        )

    @property
    def bytes_written(self) -> int:
        """Bytes handed to the operating system so far."""
        return self._file.tell()

    def write(self, table: pa.Table) -> None:
        """Append samples; full row groups go to disk. ValueError for a sample that no reader would take."""
        check_sizes(table)
        self.sample_ids += table.column("sample_id").to_pylist()
        self._pending = pa.concat_tables([self._pending, table])
        self._pending_bytes += table.nbytes
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
        per_sample = max(1, self._pending_bytes // max(1, len(self._pending)))
        return max(1, min(ROW_GROUP_SAMPLES, ROW_GROUP_BYTES // per_sample))

    def _write_row_group(self, rows: int) -> None:
        self._parquet.write_table(self._pending.slice(0, rows).combine_chunks(), row_group_size=rows)
        self._pending = self._pending.slice(rows)
        self._pending_bytes = self._pending.nbytes if len(self._pending) else 0


def check_sizes(table: pa.Table) -> None:
    """ValueError, naming it, for a sample of `table` that is larger than the largest row group that readers take."""
    limit = ONE_SAMPLE_BYTES - (ONE_SAMPLE_BYTES >> 4)  # Parquet adds levels, at most two bits a value
    rows = range(len(table)) if table.nbytes > limit else ()
    for row in (table.slice(row, 1) for row in rows):
        if row.nbytes > limit:
            name = row.column("sample_id")[0].as_py()
            raise ValueError(f"sample {name!r} has {row.nbytes} bytes, a row group holds {limit}; sample fewer tokens")


class DigestFile:
    """Hashes what it writes. After `discard` it swallows the footer that pyarrow insists on writing."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._taking = True
        self.closed = False

    @classmethod
    def create(cls, path: Path) -> DigestFile:
        """A new file on disk; FileExistsError when it exists."""
        return cls(open(path, "xb"))

    @property
    def sha256(self) -> str:
        """Digest of the bytes so far."""
        return self._hash.hexdigest()

    def tell(self) -> int:
        """Bytes so far."""
        return self._bytes

    def write(self, data: bytes) -> int:
        """Append; dropped after `discard`."""
        if self._taking:
            self._file.write(data)
            self._hash.update(data)
        self._bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Hand what is buffered to the operating system."""
        if self._taking:
            self._file.flush()

    def sync_and_close(self) -> None:
        """Wait until the bytes are on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._taking = False
        self._file.close()

    def discard(self) -> None:
        """Stop writing."""
        self._taking = False
        with suppress(OSError):  # the unflushed bytes of a file that is thrown away
            self._file.close()
