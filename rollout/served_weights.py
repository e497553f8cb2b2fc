"""Look at new weights before a served engine touches its own: names, shapes, dtypes, from headers alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from rollout.checkpoint_names import CheckpointNames
from rollout.engine_model import EngineModel
from rollout.weights import stage

FLOATS = ("F64", "F32", "BF16", "F16")


def check_checkpoint(source: Any, model: EngineModel, *, state_dicts: bool, check_finite: bool = False) -> None:
    """Refuse weights that are not those of `model`.

    Args:
        source: a directory of safetensors with the names of the served checkpoint or of `model.state_dict()`; with
            `state_dicts` also a state dict.
        check_finite: refuse NaN and infinite values, in a state dict; files of a server are not read here.

    Raises:
        ValueError: naming what is missing, unknown or of another shape; or a source that this engine cannot take.
        FileNotFoundError: no such directory.
    """
    if isinstance(source, Mapping):
        if not state_dicts:
            raise ValueError(
                "weights are a state dict, and a server reads its own files: save_pretrained() to a directory that the "
                "server sees too and pass its path"
            )
        stage(CheckpointNames(model.model), source, check_finite)
        return
    if check_finite:
        raise ValueError("check_finite reads a state dict; the files that an engine reads are not read here too")
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"weights are a {type(source).__name__}; pass a checkpoint directory")
    found, served = tensors_of(source), Path(model.path)
    names = CheckpointNames(model.model)
    accepted = [{name: tuple(tensor.shape) for name, tensor in form.items()} for form in (names.own, names.saved)]
    if served.is_dir():
        accepted.append(tensors_of(served))
    if not any(_differing(found, need) <= names.tied - found.keys() for need in accepted):
        need = accepted[-1]
        wrong = sorted(_differing(found, need))
        text = ", ".join(f"{name} is {found.get(name)}, need {need.get(name)}" for name in wrong[:3])
        raise ValueError(f"weights in {source} do not fit the served model: {text}; nothing was changed")


def _differing(found: Mapping[str, Any], need: Mapping[str, Any]) -> set[str]:
    return {name for name in found.keys() | need.keys() if found.get(name) != need.get(name)}


def saved_form(source: Mapping[str, Any], model: EngineModel) -> dict[str, Any]:
    """A state dict under the names of checkpoint files, which engines load; transformers' own names may differ."""
    tensors = dict(source)
    if tensors.keys() <= model.model.state_dict().keys():
        return revert_weight_conversion(model.model, tensors)
    return tensors


@contextlib.contextmanager
def saved_directory(source: Mapping[str, Any], model: EngineModel) -> Iterator[str]:
    """A state dict as a directory of safetensors, for workers in other processes; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="moe-rollout-") as folder:
        tied = CheckpointNames(model.model).tied  # safetensors refuses names that share memory
        tensors = {
            name: tensor.clone(memory_format=torch.contiguous_format) if name in tied else tensor.contiguous()
            for name, tensor in saved_form(source, model).items()
        }
        save_file(tensors, str(Path(folder) / "model.safetensors"))
        yield folder


def tensors_of(directory: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """Shapes by name in the safetensors files of a checkpoint; reads headers only.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a tensor is not floating point.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}; save the weights with save_pretrained()")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, "numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118, the handle is no mapping
                header = tensors.get_slice(name)
                if header.get_dtype() not in FLOATS:
                    raise ValueError(f"weight {name!r} in {file} is {header.get_dtype()}, need one of {FLOATS}")
                shapes[name] = tuple(header.get_shape())
    return shapes
