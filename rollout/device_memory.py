"""Give a model's memory on the device away and take it back, for trainers that share the device."""

from __future__ import annotations

from typing import Any

import torch

from rollout.huge_pages import empty_like


class ParkedWeights:
    """A model without its weights, from `park` to `restore`. `keep` holds a copy in host memory.

    On a CPU the host copy is the weights themselves: only `keep=False` frees memory there.
    """

    def __init__(self, model: Any, keep: bool) -> None:
        self._model = model
        self._forms: dict[str, torch.Tensor] = {}  # on no device: shapes, and strides that an engine may have chosen
        self._kept: dict[str, torch.Tensor] = {}
        self.keep = keep
        with torch.inference_mode(False):
            for name, tensor in _weights(model).items():
                self._forms[name] = torch.empty_like(tensor, device="meta")
                if keep:
                    self._kept[name] = tensor.detach().cpu()
                tensor.data = tensor.new_empty(0)
        _release_cached(model)

    def restore(self) -> None:
        """Give each weight its memory again; filled from the host copy if there is one, else to be filled."""
        with torch.inference_mode(False):
            for name, tensor in _weights(self._model).items():
                empty = None if self.keep else empty_like(self._forms[name], tensor.device)
                tensor.data = self._kept.pop(name).to(tensor.device) if empty is None else empty


def _weights(model: Any) -> dict[str, torch.Tensor]:
    """Each tensor once, whatever names it is tied to."""
    unique: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        unique.setdefault(id(tensor), (name, tensor))
    return dict(unique.values())


def _release_cached(model: Any) -> None:
    if next(model.parameters()).device.type == "cuda":
        torch.cuda.empty_cache()
