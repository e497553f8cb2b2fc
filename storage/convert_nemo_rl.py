"""NeMo-RL: signed ids, -1 at every id of a missing row; `[B, S, L, K]`, or a string per sample.

The string is `nrlre1:<dtype>:<S>x<L>x<K>:<base64 of the C-ordered little-endian array>`, dtype int8, int16 or int32.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence

import numpy as np

from storage.convert_routes import (
    Routes,
    all_rows,
    collapse_layers,
    expand_layers,
    fitting_dtype,
    recorded_part,
)
from storage.trace import RoutingSpec, Trace

SIGNED = ("int8", "int16", "int32")


def to_nemo_rl(
    traces: Sequence[Trace],
    spec: RoutingSpec,
    *,
    num_layers: int | None = None,
    dtype: str | None = None,
    pad_token_id: int = 0,
) -> dict[str, np.ndarray]:
    """input_ids int64 `[B, S]`, input_lengths int64 `[B]` and routed_experts `[B, S, L, K]`, padded at the right.

    Args:
        traces: B traces; missing rows, padding and the last sampled token become -1.
        spec: their routers.
        num_layers: NeMo-RL counts MoE layers only (None, the default); a number expands to all decoder layers.
        dtype: "int8", "int16" or "int32"; None is the narrowest that holds the model's ids, as in NeMo-RL.
        pad_token_id: for input_ids.

    Raises:
        ValueError: no traces, no routes, or a model with ids beyond `dtype` (256 experts in int8).
    """
    wire = _wire_dtype(spec, dtype)
    if not traces:
        raise ValueError("cannot export an empty list of traces")
    lengths = np.array([len(trace.token_ids) for trace in traces], np.int64)
    ids = np.full((len(traces), lengths.max()), pad_token_id, np.int64)
    routes = np.full((*ids.shape, *((num_layers or spec.num_sites), spec.top_k)), -1, wire)
    for row, trace in enumerate(traces):
        ids[row, : lengths[row]] = trace.token_ids
        routes[row, : lengths[row]] = _signed(trace, spec, num_layers, wire)
    return {"input_ids": ids, "input_lengths": lengths, "routed_experts": routes}


def to_nemo_rl_string(
    trace: Trace, spec: RoutingSpec, *, num_layers: int | None = None, dtype: str | None = None
) -> str:
    """The routes of one trace as `nrlre1:...`, S its number of tokens; arguments and errors as `to_nemo_rl`.

    >>> to_nemo_rl_string(trace, spec)  # 2 tokens, 1 site, top 2: the route (0, 1), then nothing recorded
    'nrlre1:int8:2x1x2:AAH//w=='
    """
    return encode_string(_signed(trace, spec, num_layers, _wire_dtype(spec, dtype)))


def from_nemo_rl(batch: Mapping[str, np.ndarray], spec: RoutingSpec, *, num_layers: int | None = None) -> list[Routes]:
    """The routes of each sequence, read from `routed_experts` and `input_lengths`.

    Raises:
        ValueError: shapes or ids that do not fit, or a row that is -1 in part.
    """
    pairs = zip(np.asarray(batch["routed_experts"]), np.asarray(batch["input_lengths"]), strict=True)
    return [
        _routes(array[: int(length)], spec, num_layers, f"NeMo-RL row {row}")
        for row, (array, length) in enumerate(pairs)
    ]


def from_nemo_rl_string(text: str, spec: RoutingSpec, *, num_layers: int | None = None) -> Routes:
    """The routes of one sequence whose tokens are all covered, as NeMo-RL's workers send them.

    Raises:
        ValueError: not such a string, or as `from_nemo_rl`.
    """
    return _routes(decode_string(text), spec, num_layers, "nrlre1 string")


def encode_string(array: np.ndarray) -> str:
    """`nrlre1:...` of an int8, int16 or int32 array `[S, L, K]`."""
    if array.ndim != 3 or array.dtype.name not in SIGNED:
        raise ValueError(f"nrlre1 holds [S, L, K] of {', '.join(SIGNED)}; got {array.dtype} of shape {array.shape}")
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return f"nrlre1:{array.dtype.name}:{'x'.join(map(str, array.shape))}:{base64.b64encode(data).decode()}"


def decode_string(text: str) -> np.ndarray:
    """Inverse of `encode_string`.

    Raises:
        ValueError: another magic, dtype, shape or length, or bad base64.
    """
    match = re.fullmatch(r"nrlre1:(int8|int16|int32):(\d+)x(\d+)x(\d+):([^:]*)", text)
    if match is None:
        raise ValueError(f"not 'nrlre1:<int8|int16|int32>:<S>x<L>x<K>:<base64>': {text[:60]!r}")
    dtype, shape = np.dtype(match[1]).newbyteorder("<"), tuple(int(n) for n in match.group(2, 3, 4))
    try:
        data = base64.b64decode(match[5], validate=True)
    except binascii.Error as error:
        raise ValueError(f"nrlre1 string: bad base64 ({error})") from error
    if len(data) != int(np.prod(shape)) * dtype.itemsize:
        raise ValueError(f"nrlre1 string: {len(data)} bytes for {dtype.name} {shape}; was it cut?")
    return np.frombuffer(data, dtype).astype(match[1]).reshape(shape)


def _wire_dtype(spec: RoutingSpec, dtype: str | None) -> np.dtype:
    if dtype is not None and dtype not in SIGNED:
        raise ValueError(f"dtype {dtype!r}, need one of {', '.join(SIGNED)}")
    return fitting_dtype(spec, SIGNED if dtype is None else [dtype], target="nemo-rl")


def _signed(trace: Trace, spec: RoutingSpec, num_layers: int | None, dtype: np.dtype) -> np.ndarray:
    ids, recorded = all_rows(trace, spec)
    out = expand_layers(ids.astype(dtype), spec, num_layers)
    out[~recorded] = -1
    return out


def _routes(array: np.ndarray, spec: RoutingSpec, num_layers: int | None, name: str) -> Routes:
    if array.ndim != 3:
        raise ValueError(f"{name}: shape {array.shape}, need [S, L, K]")
    negative = np.less(array, 0)
    missing = negative.all(axis=(1, 2))
    if (broken := negative.any(axis=(1, 2)) & ~missing).any():
        raise ValueError(f"{name}: row {int(broken.argmax())} is missing in part; a row is ids, or -1 throughout")
    ids = collapse_layers(np.where(missing[:, None, None], 0, array), spec, num_layers, name=name)
    rows = len(ids) - int(missing[-1:].all())  # the last token has a row only in a trace without a completion
    return recorded_part(ids[:rows], ~missing[:rows], spec, name=name)
