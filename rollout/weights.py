"""New weights for a model: gathered and checked whole, then copied in place.

Everything that can be refused is refused while the old weights still serve: `stage` reads the whole source, checks
names, shapes, dtypes and, on request, values; `StagedWeights.copy_into` only copies.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open

from rollout.checkpoint_names import CheckpointNames
from rollout.weight_transfer import full_tensors

NamedTensor: TypeAlias = tuple[str, torch.Tensor]
UNCHANGED = "nothing was changed"


@dataclass(frozen=True)
class StagedWeights:
    """A complete set of weights that fits the model. `saved` tells which of the two forms of names it has."""

    names: CheckpointNames
    tensors: Mapping[str, torch.Tensor]
    saved: bool

    @torch.no_grad()
    def copy_into(self, model: Any) -> None:
        """Copy into the model's own memory, cast to its dtypes; holds one fused weight more at a time."""
        own = model.state_dict(keep_vars=True)
        for name, tensor in self.names.convert(self.tensors) if self.saved else self.tensors.items():
            own[name].copy_(tensor)


def stage(
    names: CheckpointNames, source: Any, check_finite: bool = False, saved_first: bool | None = None
) -> StagedWeights:
    """Read `source` to its end and check it.

    A state dict is not copied. Of anything else one copy of the weights is held, in the model's dtypes, on the device
    that it comes from: this is the double buffer that lets the old weights serve until all is known to be good.

    Args:
        source: a state dict, with DTensors too; a directory of safetensors files; or an iterator of `(name, tensor)`
            or of buckets of these, whose tensors may be overwritten after the next one is asked for.
        check_finite: refuse NaN and infinite values; reads every tensor once more.
        saved_first: whether names that a family uses in both forms are a checkpoint's; by default those of a directory.

    Raises:
        ValueError: naming missing, unknown, repeated, misshapen or non-finite tensors; nothing was changed.
        FileNotFoundError: the directory does not exist or holds no safetensors files.
    """
    keep = isinstance(source, Mapping)
    tensors: dict[str, torch.Tensor] = {}
    with contextlib.closing(named_tensors(source)) as named:
        for name, tensor in named:
            if any(re.search(pattern, name) for pattern in names.ignored):
                continue
            if name in tensors:
                raise ValueError(f"weight {name!r} comes twice; {UNCHANGED}")
            _check_tensor(names, name, tensor, check_finite)
            tensors[name] = tensor if keep else _owned(names, name, tensor)
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()  # the engine copies on a stream of its own
    if saved_first is None:
        saved_first = isinstance(source, (str, Path))
    return _complete(names, tensors, saved_first)


def named_tensors(source: Any) -> Generator[NamedTensor, None, None]:
    """Whatever `stage` takes, as one generator; closing it closes the source."""
    if isinstance(source, (str, Path)):
        return _read_directory(Path(source))
    if isinstance(source, Mapping):
        return full_tensors(source)
    if isinstance(source, Iterable):
        return _flat(source)
    raise ValueError(
        f"weights are a {type(source).__name__}; pass a state dict as from model.state_dict(), a directory of "
        "safetensors files, or an iterator of (name, tensor)"
    )


def _read_directory(directory: Path) -> Generator[NamedTensor, None, None]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        what = "holds no *.safetensors files" if directory.is_dir() else "is no directory"
        raise FileNotFoundError(f"weights {str(directory)!r}: it {what}; {UNCHANGED}")
    for file in files:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 (not a mapping)
                yield name, reader.get_tensor(name)


def _flat(source: Iterable[Any]) -> Generator[NamedTensor, None, None]:
    """Single tensors and buckets alike; what makes them is closed with this."""
    try:
        for item in source:
            if isinstance(item, Mapping):
                yield from item.items()
            elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
                yield item
            else:
                yield from item
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def _check_tensor(names: CheckpointNames, name: str, tensor: Any, check_finite: bool) -> None:
    forms = [form[name] for form in (names.own, names.saved) if name in form]
    if not forms:
        raise ValueError(f"weights do not fit this model: unknown {_some([name])}; {UNCHANGED}")
    if not any(_fits(tensor, own) for own in forms):
        found = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            found = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} on {tensor.device}"
        kind = "floating point" if forms[0].is_floating_point() else str(forms[0].dtype)
        raise ValueError(f"weight {name!r} is {found}, need dense {kind} {tuple(forms[0].shape)}; {UNCHANGED}")
    if check_finite and not torch.isfinite(tensor).all():
        count = int((~torch.isfinite(tensor)).sum())
        raise ValueError(f"weight {name!r} holds {count} values that are not finite; {UNCHANGED}")


def _fits(tensor: Any, own: torch.Tensor) -> bool:
    """Whether `own.copy_(tensor)` cannot fail."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == own.shape
        and tensor.is_floating_point() == own.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_meta
    )


def _owned(names: CheckpointNames, name: str, tensor: torch.Tensor) -> torch.Tensor:
    dtype = (names.own if name in names.own else names.saved)[name].dtype
    return tensor.detach().to(dtype, copy=True)


def _complete(names: CheckpointNames, tensors: dict[str, torch.Tensor], saved_first: bool) -> StagedWeights:
    """Decide which form of names this is. Where a family uses the same names for both, a directory is `saved`."""
    problems = []
    for saved in (saved_first, not saved_first):
        form = names.saved if saved else names.own
        unknown, missing = sorted(tensors.keys() - form.keys()), sorted(form.keys() - tensors.keys() - names.tied)
        misshapen = [name for name in tensors.keys() & form.keys() if tensors[name].shape != form[name].shape]
        if not unknown and not missing and not misshapen:
            staged = StagedWeights(names, tensors, saved)
            _check_conversion(staged)
            return staged
        problems.append((len(unknown) + len(missing), unknown, missing))
    _, unknown, missing = min(problems)
    raise ValueError(f"weights do not fit this model: unknown {_some(unknown)}, missing {_some(missing)}; {UNCHANGED}")


def _check_conversion(staged: StagedWeights) -> None:
    """The conversion runs once without memory, so that it cannot fail half-way through the real one."""
    if staged.saved:
        meta = {name: tensor.to("meta") for name, tensor in staged.tensors.items()}
        for name, tensor in staged.names.convert(meta):
            if name not in staged.names.own or tensor.shape != staged.names.own[name].shape:
                raise ValueError(
                    f"saved weights become {name!r} {tuple(tensor.shape)}, which does not fit; {UNCHANGED}"
                )


def _some(names: list[str]) -> str:
    return f"{names[:5]}{' ...' if len(names) > 5 else ''}"
