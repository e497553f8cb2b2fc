"""What a row group may cost a reader, judged from the footer before a page is read. The limits of storage/FORMAT.md.

A few KB of zstd or of dictionary indices can stand for any amount of memory. A reader that holds one row group at a
time is bounded by what it lets one row group hold.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow.parquet as pq

from storage.errors import DamagedDataError

ROW_GROUP_SAMPLES = 16
SEVERAL_SAMPLES_BYTES = 512 << 20  # a writer closes a row group at about 32 MiB, later when long samples come first
ONE_SAMPLE_BYTES = 2 << 30
_REMEDY = "restore it, or remove its step and sample that again"
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}  # what is not among them repeats values that are stored once


def check_row_group(metadata: pq.FileMetaData, group: int, columns: Collection[str] | None = None) -> None:
    """DamagedDataError for a row group with too many rows, or whose columns, all or these, are too large.

    A column counts with its bytes before compression; one with a dictionary, or another encoding that refers to
    earlier values, with as many as if each of its values were all of it.
    """
    found = metadata.row_group(group)
    if found.num_rows > ROW_GROUP_SAMPLES:
        raise DamagedDataError(
            f"row group {group} has {found.num_rows} rows, a writer makes at most {ROW_GROUP_SAMPLES}; {_REMEDY}"
        )
    limit = SEVERAL_SAMPLES_BYTES if found.num_rows > 1 else ONE_SAMPLE_BYTES
    chunks = (found.column(index) for index in range(found.num_columns))
    bytes_ = sum(_bytes(c) for c in chunks if columns is None or c.path_in_schema.partition(".")[0] in columns)
    bytes_ = max(bytes_, found.total_byte_size if columns is None else 0)
    if bytes_ > limit:
        raise DamagedDataError(
            f"row group {group} may take {bytes_} bytes for {found.num_rows} rows, the limit is {limit}; {_REMEDY}"
        )


def check_row_groups(metadata: pq.FileMetaData, columns: Collection[str]) -> None:
    """The same for every row group of a file."""
    for group in range(metadata.num_row_groups):
        check_row_group(metadata, group, columns)


def _bytes(chunk: pq.ColumnChunkMetaData) -> int:
    size, values = abs(chunk.total_uncompressed_size), abs(chunk.num_values)
    return max(size * (1 if set(chunk.encodings) <= _PLAIN else values), values)
