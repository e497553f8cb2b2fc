"""slime, miles, ROLL and ms-swift: per sample one array `[T - 1, L, K]`, and nothing that says what is missing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.convert_routes import Routes, collapse_layers, complete_rows, expand_layers, refuse_zero_rows
from storage.trace import RoutingSpec, Trace


def to_slime(trace: Trace, spec: RoutingSpec, *, num_layers: int | None) -> np.ndarray:
    """int32 `[T - 1, L, K]`: `Sample.rollout_routed_experts` of slime and miles.

    Both count all decoder layers: give `num_layers`, or None for a MoE-only axis.

    >>> to_slime(trace, spec, num_layers=3).shape  # 4 tokens, MoE in layers 0 and 2
    (3, 3, 2)

    Raises:
        ValueError: missing rows, or a layer beyond num_layers.
    """
    return expand_layers(complete_rows(trace, spec, target="slime").astype(np.int32), spec, num_layers)


def to_roll(traces: Sequence[Trace], spec: RoutingSpec, *, num_layers: int | None) -> list[np.ndarray]:
    """A list, one int32 `[T - 1, L, K]` per sample, which ROLL and ms-swift pad in their own collators.

    Raises:
        ValueError: as `to_slime`.
    """
    return [to_slime(trace, spec, num_layers=num_layers) for trace in traces]


def from_slime(
    array: np.ndarray, spec: RoutingSpec, *, num_layers: int | None, num_tokens: int | None = None
) -> Routes:
    """The routes of one sample of `num_tokens` tokens (not checked when None).

    Raises:
        ValueError: another shape, ids of another model, or a row of zeros or -1 (how both fill missing rows).
    """
    name = "slime routed_experts"
    ids = collapse_layers(array, spec, num_layers, name=name)
    if ids.ndim != 3 or (num_tokens is not None and len(ids) != num_tokens - 1):
        rows = "T - 1" if num_tokens is None else num_tokens - 1
        raise ValueError(f"{name}: shape {np.shape(array)}, need [{rows}, L, K]")
    if (negative := (ids < 0).any(axis=(1, 2))).any():
        raise ValueError(
            f"{name}: row {int(negative.argmax())} is filled with -1, so it was not recorded; leave it out"
        )
    return Routes(refuse_zero_rows(spec.check_routes(ids, name=name), spec, name=name))


def from_roll(arrays: Sequence[np.ndarray], spec: RoutingSpec, *, num_layers: int | None) -> list[Routes]:
    """The routes of each sample; inverse of `to_roll`.

    Raises:
        ValueError: as `from_slime`.
    """
    return [from_slime(array, spec, num_layers=num_layers) for array in arrays]
