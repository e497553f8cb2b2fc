"""Hidden states behind each decoder layer, so that a failed self-test can name the first layer that differs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

LayerOutputs = dict[str, torch.Tensor]


@contextlib.contextmanager
def record_layers(model: Any) -> Iterator[LayerOutputs]:
    """Fill a dict of float32 `[rows, hidden]` by layer name, the rows of all forwards inside one behind the other."""
    parts: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    found: LayerOutputs = {}
    handles = [
        layer.register_forward_hook(lambda _, __, out, name=name: parts[name].append(_rows(out)))
        for name, layer in _decoder_layers(model)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        found.update({name: torch.cat(rows) for name, rows in parts.items()})


def first_difference(found: LayerOutputs, expected: LayerOutputs, tolerance: float) -> str | None:
    """Name of the first layer whose mean difference exceeds `tolerance` of the spread; None when all agree."""
    for name, truth in expected.items():
        rows = found.get(name)
        if rows is None or len(rows) < len(truth):
            return None
        error = (rows[: len(truth)] - truth).abs().mean() / truth.std()
        if not float(error) <= tolerance:
            return name
    return None


def _decoder_layers(model: Any) -> list[tuple[str, torch.nn.Module]]:
    """The members of the list of decoder layers: the module list as long as the config says."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return [(f"{name}.{index}", layer) for index, layer in enumerate(module)]
    return []


def _rows(output: Any) -> torch.Tensor:
    states = output[0] if isinstance(output, tuple) else output
    return states.detach().reshape(-1, states.shape[-1]).float().cpu().clone()
