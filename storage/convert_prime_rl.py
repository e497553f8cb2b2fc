"""prime-rl: per sample `{data, shape, start, dtype}`, data the base64 of C-ordered little-endian ids."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import numpy as np

from storage.arrays import wire_dtype
from storage.convert_routes import Routes, collapse_layers, complete_rows, expand_layers
from storage.trace import RoutingSpec, Trace

DTYPES = ("uint8", "uint16")


def to_prime_rl(trace: Trace, spec: RoutingSpec, *, num_layers: int | None) -> dict[str, Any]:
    """The JSON payload of one trace; `start` is the position of its first row, `shape` is `[rows, L, K]`.

    dtype is "uint8" up to 256 experts, else "uint16" (from the model, not the data: prime-rl#3051). prime-rl counts
    all decoder layers: give `num_layers`, or None for a MoE-only axis.

    >>> to_prime_rl(trace, spec, num_layers=None)  # 2 tokens, 1 site, top 2: the route (0, 1)
    {'data': 'AAE=', 'shape': [1, 1, 2], 'start': 0, 'dtype': 'uint8'}

    Raises:
        ValueError: rows are missing behind the first recorded one, or a layer beyond num_layers.
    """
    ids = complete_rows(trace, spec, target="prime-rl", start=trace.route_start)
    wire = np.ascontiguousarray(expand_layers(ids, spec, num_layers), wire_dtype(spec))
    return {
        "data": base64.b64encode(wire.tobytes()).decode(),
        "shape": list(wire.shape),
        "start": trace.route_start,
        "dtype": spec.dtype.name,
    }


def from_prime_rl(payload: Mapping[str, Any], spec: RoutingSpec, *, num_layers: int | None) -> Routes:
    """Inverse of `to_prime_rl`.

    Raises:
        ValueError: a field is missing or contradicts the others, or ids of another model.
    """
    try:
        dtype, shape, start = payload["dtype"], tuple(payload["shape"]), payload.get("start", 0)
        data = base64.b64decode(payload["data"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"not a prime-rl payload {{data, shape, start, dtype}}: {error!r}") from error
    if dtype not in DTYPES or len(shape) != 3 or not isinstance(start, int) or start < 0:
        raise ValueError(
            f"prime-rl payload: dtype {dtype!r}, shape {shape}, start {start!r}; need {DTYPES}, 3 axes, >= 0"
        )
    wire = np.dtype(dtype).newbyteorder("<")
    if len(data) != int(np.prod(shape)) * wire.itemsize:
        raise ValueError(f"prime-rl payload: {len(data)} bytes for {dtype} {shape}; was it cut?")
    ids = collapse_layers(np.frombuffer(data, wire).reshape(shape), spec, num_layers, name="prime-rl payload")
    return Routes(spec.check_routes(ids, name="prime-rl payload"), start)
