"""Linear layers of a model: our own kernels for few rows, and weights packed for oneDNN for more.

Products of 16 to 64 rows took 0.6 to 0.9 of the time of torch's on an AMD EPYC (AVX-512), with two threads 0.4 to 0.8.
A row's last bits then depend on how many share the product.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from rollout.native import NativeKernels, fits
from rollout.packed_experts import PackedWeight, can_pack
from rollout.router import wrap_forward

logger = logging.getLogger(__name__)
MIN_VALUES = 1 << 15
# Up to here our own kernels were faster on the same machine.
NATIVE_ROWS = {torch.float32: 16, torch.bfloat16: 8}


def use_fast_linears(model: Any, native: NativeKernels | None, budget: float, undo: contextlib.ExitStack) -> None:
    """Let the linear layers of a model's decoder and head use `native`, and packed copies of their weights if all of
    these together take at most `budget` bytes. `undo` gets what gives them their forwards back."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    head = [model.get_output_embeddings()] if hasattr(model, "get_output_embeddings") else []
    layers: list[Any] = [m for m in (*decoder.modules(), *head) if type(m) is torch.nn.Linear]
    layers = [m for m in dict.fromkeys(layers) if m.weight.numel() >= MIN_VALUES and "forward" not in vars(m)]
    to_pack = [layer for layer in layers if can_pack(layer.weight)]
    size = sum(layer.weight.nbytes for layer in to_pack)
    if size > budget:
        if budget > 0:
            gigabytes = size / 1e9, budget / 1e9
            logger.warning("linear layers are not packed, and slower: %.1f GB of copies, and %.1f are left", *gigabytes)
        to_pack = []
    packed = {layer: _packed(layer) for layer in to_pack}
    for layer in layers:
        kernels = native if fits(layer.weight) else None
        if layer in packed or kernels is not None:
            undo.callback(wrap_forward(layer, functools.partial(_linear, layer, packed.get(layer), kernels)))


def _packed(layer: Any) -> PackedWeight:
    if not hasattr(layer, "packed_weights"):
        layer.packed_weights = {"weight": PackedWeight(layer.weight)}
    packed: PackedWeight = layer.packed_weights["weight"]
    packed.pack()
    return packed


def _linear(
    layer: Any,
    packed: PackedWeight | None,
    native: NativeKernels | None,
    forward: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    most_rows = 0 if native is None else NATIVE_ROWS[layer.weight.dtype]

    def linear(input: torch.Tensor) -> torch.Tensor:
        if not input.numel() or input.dtype is not layer.weight.dtype or input.shape[-1] != layer.in_features:
            return forward(input)
        rows = input.reshape(-1, layer.in_features)
        if native is not None and len(rows) <= most_rows:
            out = native.linear(rows, layer.weight)
            out = out if layer.bias is None else out.add_(layer.bias)
        elif packed is not None and packed.is_faster(len(rows)):
            out = packed.linear(rows, bias=layer.bias)
        else:
            return forward(input)
        return out.view(*input.shape[:-1], layer.out_features)

    return linear
