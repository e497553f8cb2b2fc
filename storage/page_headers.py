"""What the pages of a column chunk say of themselves: the decoder goes by these, whatever the footer says.

Headers are Thrift structs in the compact protocol: PageHeader in parquet.thrift of
https://github.com/apache/parquet-format.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow.parquet as pq

_WINDOWS = (256, 1 << 16)  # bytes to read of a header: nearly always enough, and the most that any has
_DATA, _DATA_V2 = 0, 3  # beside them: index, dictionary
_PLAIN = (0, 3)  # PLAIN, RLE; all others refer to values that are stored elsewhere, or once
_DEPTH = 8


class Pages(NamedTuple):
    """Of one column chunk: bytes before compression with headers, values, and whether values may repeat others."""

    bytes: int
    values: int
    repeats: bool


def read_pages(file: Any, chunk: pq.ColumnChunkMetaData) -> Pages:
    """Walk the page headers of `chunk` in the open `file`, as far as a decoder would.

    Raises:
        ValueError: for what is no header.
    """
    at, stop = _span(chunk)
    bytes_, values, repeats = 0, 0, False
    while values < chunk.num_values and at < stop:
        header, length = _header(file, at)
        kind, size, stored = (_count(header, number) for number in (1, 2, 3))
        if kind in (_DATA, _DATA_V2):
            page = header.get(5 if kind == _DATA else 8)
            values += _count(page, 1)
            repeats |= _count(page, 2 if kind == _DATA else 4) not in _PLAIN
        bytes_ += size + length
        at += length + stored
    return Pages(bytes_, values, repeats)


def _span(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    first = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
    start = min(chunk.data_page_offset, first) if first else chunk.data_page_offset
    return start, start + chunk.total_compressed_size


def _header(file: Any, at: int) -> tuple[dict[int, Any], int]:
    for window in _WINDOWS:
        data = file.read_at(window, at)
        try:
            return _struct(data, 0, _DEPTH)
        except IndexError:
            continue
    raise ValueError(f"there is no page header at byte {at}")


def _count(fields: Any, number: int) -> int:
    value = fields.get(number) if isinstance(fields, dict) else None
    if type(value) is not int or value < 0:
        raise ValueError(f"field {number} of a page header is {value!r}, need an integer from 0 on")
    return value


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Its fields by number, and where it ends; IndexError when that is beyond `data`."""
    fields: dict[int, Any] = {}
    number = 0
    while data[at]:
        kind, step = data[at] & 15, data[at] >> 4
        at += 1
        if step:
            number += step
        else:
            number, at = _integer(data, at)
        fields[number], at = (kind == 1, at) if kind in (1, 2) else _value(data, at, kind, depth)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2, 3):
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _integer(data, at)
    if kind == 7:
        return data[at + 7], at + 8
    if kind == 8:
        length, at = _varint(data, at)
        return None, at + length
    if kind in (9, 10) and depth:
        count, element, at = data[at] >> 4, data[at] & 15, at + 1
        if count == 15:
            count, at = _varint(data, at)
        for _ in range(count):
            _, at = _value(data, at, element, depth - 1)
        return None, at
    if kind == 12 and depth:
        return _struct(data, at, depth - 1)
    raise ValueError(f"a page header holds a value of type {kind}")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
