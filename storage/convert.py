"""Traces in the formats of trainers, and back: one module per codec, all of them here, and export to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from storage.convert_counts import expert_counts
from storage.convert_fireworks import from_fireworks, to_fireworks
from storage.convert_megatron import from_megatron, to_megatron
from storage.convert_nemo_rl import from_nemo_rl, from_nemo_rl_string, to_nemo_rl, to_nemo_rl_string
from storage.convert_prime_rl import from_prime_rl, to_prime_rl
from storage.convert_routes import Routes, collapse_layers, expand_layers
from storage.convert_safetensors import from_safetensors, save_arrays, to_safetensors, with_new_file
from storage.convert_skyrl import from_skyrl, to_skyrl
from storage.convert_slime import from_roll, from_slime, to_roll, to_slime
from storage.convert_verl import from_verl, to_verl
from storage.trace import RoutingSpec, Trace

__all__ = [
    "ALL_LAYERS",
    "FORMATS",
    "Routes",
    "collapse_layers",
    "expand_layers",
    "expert_counts",
    "export_file",
    "from_fireworks",
    "from_megatron",
    "from_nemo_rl",
    "from_nemo_rl_string",
    "from_prime_rl",
    "from_roll",
    "from_safetensors",
    "from_skyrl",
    "from_slime",
    "from_verl",
    "to_fireworks",
    "to_megatron",
    "to_nemo_rl",
    "to_nemo_rl_string",
    "to_prime_rl",
    "to_roll",
    "to_safetensors",
    "to_skyrl",
    "to_slime",
    "to_verl",
]

BATCHES: dict[str, Callable[..., dict[str, np.ndarray]]] = {"verl": to_verl, "nemo-rl": to_nemo_rl, "skyrl": to_skyrl}
PAYLOADS: dict[str, Callable[..., Any]] = {
    "nemo-rl-string": to_nemo_rl_string,
    "prime-rl": to_prime_rl,
    "fireworks-r3": to_fireworks,
}
SAMPLES = {
    "slime": "rollout_routed_experts",
    "miles": "rollout_routed_experts",
    "roll": "routed_experts",
    "ms-swift": "routed_experts",
}
WITHOUT_LAYER_AXIS = ("megatron", "safetensors")
FORMATS = (*BATCHES, *SAMPLES, *PAYLOADS, "expert-counts", *WITHOUT_LAYER_AXIS)
ALL_LAYERS = ("verl", "skyrl", *SAMPLES, "prime-rl")  # their readers index the layer axis by decoder layer


def export_file(
    traces: Sequence[Trace],
    spec: RoutingSpec,
    *,
    to: str,
    out: str | os.PathLike[str],
    num_layers: int | None = None,
    moe_only: bool = False,
) -> None:
    """Write `traces` to the new file `out`, in one of FORMATS.

    verl, nemo-rl and skyrl: safetensors with the arrays of the batch. slime, miles, roll and ms-swift: safetensors with
    int64 `i/tokens` and the routes of sample i. megatron: safetensors with `router.i`,
    int64 `input_ids` `[tokens]` and int32 `cu_seqlens` of the packed sequences. expert-counts: safetensors with
    `counts`. nemo-rl-string, prime-rl and fireworks-r3: a JSON line per sample with sample_id, prompt_ids,
    completion_ids and routed_experts. safetensors: see `to_safetensors`. The header of the other safetensors files
    holds format, sample_ids and spec.

    Args:
        traces: B traces, all with routes.
        spec: their routers.
        to: the format.
        out: a file that does not exist; it appears whole or not at all.
        num_layers: decoder layers of the model, for an axis of all layers, zeros at dense ones.
        moe_only: a layer axis without dense layers for a format of ALL_LAYERS, which needs one or the other.

    Raises:
        ValueError: an unknown format, no traces, no layer count where one is needed, or data the format cannot hold.
        FileExistsError: `out` exists.
    """
    _check(traces, to, num_layers, moe_only)
    layers: dict[str, Any] = {} if to in WITHOUT_LAYER_AXIS else {"num_layers": num_layers}
    if to == "safetensors":
        to_safetensors(traces, spec, out)
    elif to in PAYLOADS:
        encode = PAYLOADS[to]
        records = [_record(trace, encode(trace, spec, **layers)) for trace in traces]
        with_new_file(out, partial(_write_lines, records))
    else:
        header = {"format": to, "sample_ids": json.dumps([t.sample_id for t in traces]), "spec": spec.to_json()}
        save_arrays(out, _arrays(traces, spec, to, layers), header)


def _check(traces: Sequence[Trace], to: str, num_layers: int | None, moe_only: bool) -> None:
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}; known: {', '.join(FORMATS)}")
    if not traces:
        raise ValueError("there are no traces to export")
    if moe_only and num_layers is not None:
        raise ValueError("give the decoder layer count or ask for MoE layers only, not both")
    if to in ALL_LAYERS and num_layers is None and not moe_only:
        raise ValueError(
            f"{to} counts all decoder layers, and traces know only those with a router; give the model's layer count "
            "(--num-layers, num_layers=), or ask for MoE layers only (--moe-only, moe_only=True)"
        )
    if to in WITHOUT_LAYER_AXIS and num_layers is not None:
        raise ValueError(f"{to} has no layer axis; leave the layer count out")


def _arrays(traces: Sequence[Trace], spec: RoutingSpec, to: str, layers: dict[str, Any]) -> dict[str, np.ndarray]:
    if to in BATCHES:
        return BATCHES[to](traces, spec, **layers)
    if to == "megatron":
        return _packed_tokens(traces) | {f"router.{i}": ids for i, ids in enumerate(to_megatron(traces, spec))}
    if to == "expert-counts":
        return {"counts": expert_counts(traces, spec, **layers)}
    tokens = {f"{index}/tokens": np.array(trace.token_ids, np.int64) for index, trace in enumerate(traces)}
    routes = to_roll(traces, spec, **layers)
    return tokens | {f"{index}/{SAMPLES[to]}": ids for index, ids in enumerate(routes)}


def _packed_tokens(traces: Sequence[Trace]) -> dict[str, np.ndarray]:
    lengths = [len(trace.token_ids) for trace in traces]
    return {
        "input_ids": np.array([token for trace in traces for token in trace.token_ids], np.int64),
        "cu_seqlens": np.cumsum([0, *lengths], dtype=np.int32),
    }


def _record(trace: Trace, payload: Any) -> dict[str, Any]:
    return {
        "sample_id": trace.sample_id,
        "prompt_ids": trace.prompt_ids,
        "completion_ids": trace.completion_ids,
        "routed_experts": payload,
    }


def _write_lines(records: Sequence[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
