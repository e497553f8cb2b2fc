"""Weights on their way to the ranks of a group: written once, then each rank reads all that is not another's expert."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from rollout.parallel import ExpertRange
from rollout.sharded_loader import NUMBERED, own_tensor_name
from rollout.weights import UNCHANGED, NamedTensor, named_tensors

logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 2**30


class SavedWeights(NamedTuple):
    """A set of weights as safetensors files. `saved_names`: under a checkpoint's names where both forms share some."""

    directory: str
    version: int
    saved_names: bool

    @property
    def where(self) -> tuple[str, bool]:
        """What a rank reads them by."""
        return self.directory, self.saved_names


def save(source: Any, version: int, parent: str) -> SavedWeights:
    """Read `source`, whatever `stage` takes, into a new directory in `parent`; a directory stays where it is.

    Raises:
        ValueError, FileNotFoundError: the source is none, or names a weight twice.
    """
    if isinstance(source, (str, Path)):
        return SavedWeights(str(Path(source).resolve()), version, True)
    directory = Path(tempfile.mkdtemp(prefix=f"weights-{version}-", dir=Path(parent).resolve()))
    try:
        _write_all(source, directory)
    except BaseException:
        shutil.rmtree(directory)
        raise
    return SavedWeights(str(directory), version, False)


def discard(weights: SavedWeights | None, parent: str) -> None:
    """Delete what `save` wrote in `parent`, once nobody is to read it again; a checkpoint of the caller's stays."""
    if weights is not None and Path(weights.directory).parent == Path(parent).resolve():
        shutil.rmtree(weights.directory, onerror=_log)


def _log(function: Any, path: Any, error: Any) -> None:
    """What cannot be deleted stays: the update that it belonged to has long succeeded or failed."""
    if not isinstance(error[1], FileNotFoundError):
        logger.warning("cannot delete %s: %s", path, error[1])


def _write_all(source: Any, directory: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    seen: set[str] = set()
    with contextlib.closing(named_tensors(source)) as named:
        for name, tensor in named:
            if name in seen:
                raise ValueError(f"weight {name!r} comes twice; {UNCHANGED}")
            seen.add(name)
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            if sum(t.nbytes for t in tensors.values()) > MAX_FILE_BYTES:
                _write(directory, tensors)
    _write(directory, tensors)


def _write(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    count = len(list(directory.iterdir()))
    save_file(tensors, directory / f"part-{count:05}.safetensors")
    tensors.clear()


def part_of(source: Any, experts: ExpertRange) -> Iterator[NamedTensor]:
    """The weights of `source` that a rank holds, under its own numbers.

    Raises:
        ValueError: experts in one tensor that are not as many as the model has.
    """
    with contextlib.closing(named_tensors(source)) as named:
        for name, tensor in named:
            if NUMBERED.search(name) is not None:
                if (own := own_tensor_name(name, experts)) is not None:
                    yield own, tensor
            elif ".experts." in name:
                if tensor.shape[:1] != (experts.num_experts,):
                    raise ValueError(
                        f"weight {name!r} is {tuple(tensor.shape)}, need {experts.num_experts} experts; {UNCHANGED}"
                    )
                yield name, tensor[experts.start : experts.end]
            else:
                yield name, tensor
