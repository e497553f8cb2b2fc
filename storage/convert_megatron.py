"""Megatron-Core: one int64 `[tokens, K]` per MoE router, as `RouterReplay.set_replay_data` takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.convert_routes import Routes, complete_rows, spread_ids
from storage.trace import RoutingSpec, Trace


def to_megatron(
    traces: Sequence[Trace], spec: RoutingSpec, *, sites: Sequence[int] | None = None, multiple: int = 1
) -> list[np.ndarray]:
    """A list in router order of int64 `[tokens, K]`, K that router's own.

    Sequences are packed one after another, and the end is padded to a `multiple` of tokens (tensor or context
    parallel size). The last token of each sequence and the padding have no recorded row; since the dispatcher counts
    on K distinct experts in every row, they get K distinct ids, spread evenly (miles#2697). Megatron has no replay
    mask: exclude those tokens by its padding mask, and leave `moe_router_fusion` off, which ignores replay.

    Args:
        traces: the sequences of one micro-batch.
        spec: their routers.
        sites: indices of the routers of this pipeline rank; None for all.
        multiple: of tokens per micro-batch.

    Raises:
        ValueError: no traces, or missing rows.
    """
    if not traces:
        raise ValueError("cannot export an empty list of traces")
    blocks = [complete_rows(trace, spec, target="megatron") for trace in traces]
    lengths = [len(block) + 1 for block in blocks]
    total = -(-sum(lengths) // multiple) * multiple
    recorded = np.ones(total, bool)
    recorded[np.cumsum(lengths) - 1] = False
    recorded[sum(lengths) :] = False
    rows = np.concatenate(blocks)
    return [_router(rows, recorded, spec, index) for index in (range(spec.num_sites) if sites is None else sites)]


def _router(rows: np.ndarray, recorded: np.ndarray, spec: RoutingSpec, index: int) -> np.ndarray:
    site = spec.sites[index]
    out = np.empty((len(recorded), site.top_k), np.int64)
    out[recorded] = rows[:, index, : site.top_k]
    out[~recorded] = spread_ids(int((~recorded).sum()), site.num_experts, site.top_k)
    return out


def from_megatron(arrays: Sequence[np.ndarray], spec: RoutingSpec, *, lengths: Sequence[int]) -> list[Routes]:
    """The routes of each packed sequence; inverse of `to_megatron` for all sites.

    Megatron keeps no mask: the last token of each sequence and the end are taken as padding, as `to_megatron` writes.

    Args:
        arrays: int64 `[tokens, K]` per router of `spec`, in its order.
        lengths: tokens of each sequence, np.diff(cu_seqlens).

    Raises:
        ValueError: another number of routers, shapes that do not fit, or ids of another model.
    """
    if len(arrays) != spec.num_sites:
        raise ValueError(f"megatron has {len(arrays)} routers, this model {spec.num_sites}; merge the pipeline ranks")
    if not lengths or min(lengths) < 2:
        raise ValueError(f"lengths {list(lengths)}: need one per sequence, each of 2 tokens or more")
    ids = np.zeros((sum(lengths), *spec.row_shape), np.int64)
    for index, (site, array) in enumerate(zip(spec.sites, arrays, strict=True)):
        given = np.asarray(array)
        if given.ndim != 2 or len(given) < len(ids) or given.shape[1] != site.top_k or given.dtype.kind not in "iu":
            raise ValueError(
                f"megatron router {index}: {given.dtype} of shape {given.shape}, need integers "
                f"[{len(ids)} or more tokens, {site.top_k}]"
            )
        ids[:, index, : site.top_k] = given[: len(ids)]
    ends = np.cumsum(lengths)
    return [
        Routes(spec.check_routes(ids[end - length : end - 1], name=f"megatron sequence {row}"))
        for row, (length, end) in enumerate(zip(lengths, ends, strict=True))
    ]
