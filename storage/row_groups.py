"""What a row group may cost a reader, judged before a page is decompressed. The limits of storage/FORMAT.md.

A few KB of zstd or of dictionary indices can stand for any amount of memory. A reader that holds one row group at a
time is bounded by what it lets one row group hold.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow.parquet as pq

from storage.errors import RESTORE, DamagedDataError
from storage.page_headers import read_pages

ROW_GROUP_SAMPLES = 16
SEVERAL_SAMPLES_BYTES = 512 << 20  # a writer closes a row group at about 32 MiB, later when long samples come first
ONE_SAMPLE_BYTES = 2 << 30
_PLAIN = {"PLAIN", "RLE", "BIT_PACKED"}  # what is not among them repeats values that are stored once


def check_row_group(
    metadata: pq.FileMetaData, group: int, columns: Collection[str] | None = None, file: Any = None
) -> None:
    """DamagedDataError for a row group with too many rows, or whose columns, all or these, are too large.

    A column counts with its bytes before compression; one with a dictionary, or another encoding that refers to
    earlier values, with as many as if each of its values were all of it. With the open `file` its page headers count
    too, which is what a decoder goes by: a footer may lie.
    """
    found = metadata.row_group(group)
    if found.num_rows > ROW_GROUP_SAMPLES:
        raise DamagedDataError(
            f"row group {group} has {found.num_rows} rows, a writer makes at most {ROW_GROUP_SAMPLES}; {RESTORE}"
        )
    limit = SEVERAL_SAMPLES_BYTES if found.num_rows > 1 else ONE_SAMPLE_BYTES
    chunks = (found.column(index) for index in range(found.num_columns))
    chosen = [c for c in chunks if columns is None or c.path_in_schema.partition(".")[0] in columns]
    bytes_ = max(sum(map(_declared, chosen)), found.total_byte_size if columns is None else 0)
    if file is not None and bytes_ <= limit:
        bytes_ = sum(_cost(*read_pages(file, chunk)) for chunk in chosen)
    if bytes_ > limit:
        raise DamagedDataError(
            f"row group {group} may take {bytes_} bytes for {found.num_rows} rows, the limit is {limit}; {RESTORE}"
        )


def _declared(chunk: pq.ColumnChunkMetaData) -> int:
    repeats = not set(chunk.encodings) <= _PLAIN
    return _cost(abs(chunk.total_uncompressed_size), abs(chunk.num_values), repeats)


def _cost(size: int, values: int, repeats: bool) -> int:
    return max(size * (values if repeats else 1), values)
