"""Fireworks R3/v1: per sample a binary frame, zstd-compressed, as base64.

Read from the public decoder, `eval_protocol/adapters/r3_deserializer.py` of eval-protocol/python-sdk. Little-endian:
magic "R3V1"; version, selector, dtype and flags, one byte each; uint32 rows in all, rows present, first row present and
bytes of the selector; uint64 bytes of the ids; the selector; the ids of the rows present. Selector 0 is all rows, 1 a
suffix, 2 a bitmap with the lowest bit first. dtype 1 is uint8 and 2 uint16. The frame does not say how a row is shaped:
here it is C-ordered `[L, K]`.
"""

from __future__ import annotations

import base64
import binascii
import struct

import numpy as np
import pyarrow as pa

from storage.arrays import wire_dtype
from storage.convert_routes import Routes, all_rows, collapse_layers, expand_layers, recorded_part
from storage.trace import RoutingSpec, Trace

HEADER = struct.Struct("<4sBBBBIIIIQ")
MAGIC, VERSION = b"R3V1", 1
ALL, SUFFIX, BITMAP = range(3)


def to_fireworks(trace: Trace, spec: RoutingSpec, *, num_layers: int | None = None) -> str:
    """The frame of one trace, T - 1 rows in all; missing rows are absent, by suffix or bitmap.

    Raises:
        ValueError: the trace has no routes, or a layer lies beyond num_layers.
    """
    ids, recorded = all_rows(trace, spec)
    ids, recorded = ids[: trace.num_rows], recorded[: trace.num_rows]
    first = int(recorded.argmax()) if recorded.any() else len(recorded)
    mode = BITMAP if not recorded[first:].all() else SUFFIX if first else ALL
    selector = np.packbits(recorded, bitorder="little").tobytes() if mode == BITMAP else b""
    rows = np.ascontiguousarray(expand_layers(ids[recorded], spec, num_layers), wire_dtype(spec)).tobytes()
    counts = len(recorded), int(recorded.sum()), first
    header = HEADER.pack(MAGIC, VERSION, mode, spec.dtype.itemsize, 0, *counts, len(selector), len(rows))
    frame = pa.compress(header + selector + rows, codec="zstd", asbytes=True)
    return base64.b64encode(frame).decode()


def from_fireworks(text: str, spec: RoutingSpec, *, num_layers: int | None = None) -> Routes:
    """Inverse of `to_fireworks`.

    Raises:
        ValueError: not such a frame, a frame that was cut, or ids of another model.
    """
    frame = _decompress(text)
    if len(frame) < HEADER.size:
        raise ValueError(f"R3/v1 frame: {len(frame)} bytes, the header alone has {HEADER.size}; was it cut?")
    magic, version, mode, width, _, total, present, first, *lengths = HEADER.unpack_from(frame)
    if (magic, version) != (MAGIC, VERSION) or mode not in (ALL, SUFFIX, BITMAP) or width not in (1, 2):
        raise ValueError(f"not an R3/v1 frame: magic {magic!r}, version {version}, selector {mode}, dtype {width}")
    layers = num_layers or spec.num_sites
    if len(frame) != HEADER.size + sum(lengths) or lengths[1] != present * layers * spec.top_k * width:
        raise ValueError(
            f"R3/v1 frame: {len(frame)} bytes for {present} rows of {layers} x {spec.top_k} ids of {width} bytes; "
            "was it cut, or is it another model's?"
        )
    body = frame[HEADER.size :]
    recorded = _recorded(mode, body[: lengths[0]], total, first)
    if recorded.sum() != present:
        raise ValueError(f"R3/v1 frame: the selector marks {recorded.sum()} rows, the header says {present}")
    rows = np.frombuffer(body[lengths[0] :], f"<u{width}").reshape(present, layers, spec.top_k)
    ids = np.zeros((total, *spec.row_shape), rows.dtype)
    ids[recorded] = collapse_layers(rows, spec, num_layers, name="R3/v1 frame")
    return recorded_part(ids, recorded, spec, name="R3/v1 frame")


def _decompress(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
        with pa.input_stream(pa.py_buffer(data), compression="zstd") as stream:
            return stream.read()
    except (binascii.Error, OSError) as error:
        raise ValueError(f"not an R3/v1 frame: {error}") from error


def _recorded(mode: int, selector: bytes, total: int, first: int) -> np.ndarray:
    if mode == BITMAP:
        bits = np.unpackbits(np.frombuffer(selector, np.uint8), bitorder="little")
        if len(bits) < total:
            raise ValueError(f"R3/v1 frame: a bitmap of {len(bits)} bits for {total} rows; was it cut?")
        return bits[:total].astype(bool)
    return np.arange(total) >= (first if mode == SUFFIX else 0)
