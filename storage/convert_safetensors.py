"""Traces in one safetensors file, without loss: arrays as tensors `0/prompt_ids`, ..., else JSON in the header."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from storage.trace import RoutingSpec, Trace

FORMAT = "moe-rollout traces 1"
ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "raw_logprobs", "routed_experts", "route_valid")


def to_safetensors(traces: Iterable[Trace], spec: RoutingSpec, path: str | os.PathLike[str]) -> None:
    """Write `traces` to the new file `path`; tensor `i/routed_experts` is `[rows, sites, K]` of the spec's dtype.

    Raises:
        FileExistsError: `path` exists.
        ValueError: routes of another model.
        ImportError: the package safetensors is missing.
    """
    arrays: dict[str, np.ndarray] = {}
    records = []
    for index, trace in enumerate(traces):
        values = {field.name: getattr(trace, field.name) for field in fields(trace)}
        present = {name: value for name in ARRAYS if (value := values.pop(name)) is not None}
        for name in ("prompt_ids", "completion_ids"):
            present[name] = np.asarray(present[name], np.int64)
        if "routed_experts" in present:
            name = f"trace {trace.sample_id!r}"
            present["routed_experts"] = spec.check_routes(present["routed_experts"], name=name)
        arrays |= {f"{index}/{name}": array for name, array in present.items()}
        records.append(values)
    save_arrays(path, arrays, {"format": FORMAT, "spec": spec.to_json(), "traces": json.dumps(records)})


def from_safetensors(path: str | os.PathLike[str]) -> tuple[RoutingSpec, list[Trace]]:
    """The spec and the traces of a file of `to_safetensors`.

    Raises:
        ValueError: another kind of safetensors file.
        ImportError: the package safetensors is missing.
    """
    with _safetensors().safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} holds {metadata.get('format')!r}, need {FORMAT!r}")
        names = set(file.keys())
        records = json.loads(metadata["traces"])
        present = [[name for name in ARRAYS if f"{index}/{name}" in names] for index in range(len(records))]
        arrays = [{name: file.get_tensor(f"{i}/{name}") for name in found} for i, found in enumerate(present)]
    optional = dict.fromkeys(ARRAYS)
    traces = [Trace(**(optional | found | record)) for found, record in zip(arrays, records, strict=True)]
    return RoutingSpec.from_json(metadata["spec"]), traces


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a new safetensors file, which appears whole or not at all; errors as `to_safetensors`."""
    save = _safetensors().numpy.save_file
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with_new_file(path, lambda staged: save(contiguous, staged, dict(metadata)))


def with_new_file(path: str | os.PathLike[str], write: Any) -> None:
    """Call `write` with a staging path next to `path` and rename it; FileExistsError when `path` exists."""
    target = Path(path)
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or name another file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no directory; make it first")
    staged = target.with_name(target.name + ".partial")
    try:
        write(staged)
        staged.rename(target)
    finally:
        staged.unlink(missing_ok=True)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("this needs the package safetensors: pip install safetensors") from error
    return safetensors
