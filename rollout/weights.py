"""Replace the weights of a model in place, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def check_state_dict(model: Any, source: Any) -> dict[str, torch.Tensor]:
    """The tensors of `source` by the model's own names, if they fit.

    Tied weights may be left out or given under each of their names.

    Raises:
        ValueError: naming missing, unknown or misshapen tensors.
    """
    if not isinstance(source, Mapping):
        raise ValueError(f"weights are a {type(source).__name__}; pass a state dict as from model.state_dict()")
    own = dict(model.state_dict(keep_vars=True))
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    unknown = sorted(source.keys() - own.keys())
    missing = sorted(own.keys() - source.keys() - tied)
    if unknown or missing:
        raise ValueError(
            f"weights do not fit this model: unknown {_some(unknown)}, missing {_some(missing)}; nothing was changed"
        )
    for name, tensor in source.items():
        if not _fits(tensor, own[name]):
            found = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                found = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout} on {tensor.device}"
            raise ValueError(
                f"weight {name!r} is {found}, need dense floating point {tuple(own[name].shape)}; nothing was changed"
            )
    return dict(source)


def _fits(tensor: Any, own: torch.Tensor) -> bool:
    """Whether `own.copy_(tensor)` cannot fail."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.shape == own.shape
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_meta
    )


def _some(names: list[str]) -> str:
    return f"{names[:5]}{' ...' if len(names) > 5 else ''}"


@torch.no_grad()
def copy_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy checked tensors into the model; dtypes are cast to the model's."""
    own = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
