"""What every exchange format needs: the recorded rows of a trace, the layer axis, and ids that fit a dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from storage.trace import RoutingSpec, Trace


class Routes(NamedTuple):
    """Recorded rows of one sequence, named as in Trace and ready for it; what the importers return.

    >>> routes = from_prime_rl(payload, spec)
    >>> Trace(..., routed_experts=routes.ids, route_start=routes.start, route_valid=routes.valid)

    Attributes:
        ids: `[rows, sites, K]` of the spec's dtype; missing rows are zeros.
        start: position of the first row; leading missing rows are always left out.
        valid: None when no later row is missing, else one bool per row.
    """

    ids: np.ndarray
    start: int = 0
    valid: np.ndarray | None = None


def all_rows(trace: Trace, spec: RoutingSpec) -> tuple[np.ndarray, np.ndarray]:
    """Ids `[T, sites, K]`, zeros where missing, and bool `[T]`, True where recorded; T tokens.

    Raises:
        ValueError: the trace has no routes, or routes of another model.
    """
    name = f"trace {trace.sample_id!r}"
    if trace.routed_experts is None:
        raise ValueError(f"{name} has no routes (finish_reason {trace.finish_reason!r}); leave it out")
    rows = slice(trace.route_start, trace.route_start + trace.route_len)
    ids = np.zeros((len(trace.token_ids), *spec.row_shape), spec.dtype)
    recorded = np.zeros(len(trace.token_ids), bool)
    ids[rows] = spec.check_routes(trace.routed_experts, name=name)
    recorded[rows] = True if trace.route_valid is None else trace.route_valid
    return ids, recorded


def complete_rows(trace: Trace, spec: RoutingSpec, *, target: str, start: int = 0) -> np.ndarray:
    """Ids `[T - 1 - start, sites, K]` for a format that cannot say which of these rows are missing.

    Raises:
        ValueError: a row from `start` on is missing, or the trace has no completion and therefore T rows.
    """
    ids, recorded = all_rows(trace, spec)
    name = f"trace {trace.sample_id!r}"
    if not trace.completion_ids:
        raise ValueError(f"{name} has no completion: T rows, and {target} holds T - 1; leave it out")
    missing = ~recorded[start:-1]
    if missing.any():
        raise ValueError(
            f"{name}: row {start + int(missing.argmax())} was not recorded and {target} has no mask for it; "
            "use nemo-rl, skyrl, fireworks-r3 or safetensors"
        )
    return ids[start:-1]


def recorded_part(ids: np.ndarray, recorded: np.ndarray, spec: RoutingSpec, *, name: str) -> Routes:
    """Inverse of `all_rows`: `[rows, sites, K]` and bool `[rows]` as checked Routes."""
    start = int(recorded.argmax()) if recorded.any() else len(recorded)
    valid = recorded[start:]
    rows = np.where(valid[:, None, None], ids[start:], 0)
    return Routes(spec.check_routes(rows, name=name), start, None if valid.all() else valid)


def expand_layers(ids: np.ndarray, spec: RoutingSpec, num_layers: int | None) -> np.ndarray:
    """`[..., sites, K]` as `[..., num_layers, K]`, zeros at dense layers; as it is when num_layers is None.

    Raises:
        ValueError: a site lies beyond num_layers, or two sites share a layer.
    """
    if num_layers is None:
        return ids
    out = np.zeros((*ids.shape[:-2], num_layers, ids.shape[-1]), ids.dtype)
    out[..., _layers(spec, num_layers), :] = ids
    return out


def collapse_layers(array: Any, spec: RoutingSpec, num_layers: int | None, *, name: str) -> np.ndarray:
    """Inverse of `expand_layers`: `[..., sites, K]`.

    Raises:
        ValueError: not integers, another number of layers or ids, or an id at a dense layer.
    """
    array = np.asarray(array)
    need = (spec.num_sites if num_layers is None else num_layers, spec.top_k)
    if array.ndim < 2 or array.shape[-2:] != need or array.dtype.kind not in "iu":
        axis = "sites" if num_layers is None else "layers"
        raise ValueError(
            f"{name}: {array.dtype} of shape {array.shape}, need integers [..., {need[0]} {axis}, {need[1]}]"
        )
    if num_layers is None:
        return array
    layers = _layers(spec, num_layers)
    dense = np.setdiff1d(np.arange(num_layers), layers)
    used = array[..., dense, :].any(axis=-1).reshape(-1, len(dense)).any(axis=0)
    if used.any():
        raise ValueError(
            f"{name}: layer {dense[used.argmax()]} has ids, but no router of this model; is it another model's?"
        )
    return array[..., layers, :]


def fitting_dtype(spec: RoutingSpec, dtypes: Sequence[str], *, target: str) -> np.dtype:
    """The first of `dtypes` that holds every id of the spec (never chosen from the data).

    Raises:
        ValueError: none does.
    """
    highest = max(site.num_experts for site in spec.sites) - 1
    for dtype in (np.dtype(candidate) for candidate in dtypes):
        if highest <= np.iinfo(dtype).max:
            return dtype
    last = np.dtype(dtypes[-1])
    raise ValueError(
        f"{target} stores {last} ids up to {np.iinfo(last).max}, this model has ids up to {highest}; "
        "use a format with a wider dtype, such as slime or safetensors"
    )


def spread_ids(num_rows: int, num_experts: int, top_k: int) -> np.ndarray:
    """int64 `[num_rows, top_k]` for rows that nobody reads: distinct in a row, evenly spread over the experts.

    >>> spread_ids(2, num_experts=3, top_k=2).tolist()
    [[0, 1], [2, 0]]
    """
    return np.arange(num_rows * top_k).reshape(num_rows, top_k) % num_experts


def refuse_zero_rows(ids: np.ndarray, spec: RoutingSpec, *, name: str) -> np.ndarray:
    """`ids` `[rows, sites, K]`, unless a row is all zeros: with K > 1 no router returns expert 0 twice."""
    zero = ~ids.any(axis=(1, 2))
    if spec.top_k > 1 and zero.any():
        raise ValueError(f"{name}: row {int(zero.argmax())} is all zeros, so it was not recorded; leave the sample out")
    return ids


def _layers(spec: RoutingSpec, num_layers: int) -> list[int]:
    layers = [site.layer for site in spec.sites]
    last = max(spec.sites, key=lambda site: site.layer)
    if last.layer >= num_layers:
        raise ValueError(
            f"num_layers={num_layers}, but {last.name!r} is in layer {last.layer}; give the count of all decoder layers"
        )
    if len(set(layers)) < len(layers):
        raise ValueError("two routers share a decoder layer, so a layer axis cannot hold them; use the MoE-only axis")
    return layers
