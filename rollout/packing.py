"""Does a model keep the sequences of a packed batch apart? transformers does, but not in every family.

Positions that restart make transformers build a mask of blocks, where a family hands its positions to the mask (gpt_oss
and afmoe in 5.24 do not) and where nothing but that mask connects tokens (convolutions, recurrent states and compressed
keys do). So the model itself is asked: no gradient may flow from one sequence to another.
"""

from __future__ import annotations

from typing import Any

import torch

PROBE_TOKENS = 192
"""Of each of two sequences: enough to fill the blocks of 128 tokens that compressing layers have."""


def check_packable(model: Any) -> None:
    """Raise ValueError when a packed batch would mix its sequences; one forward and backward of two short ones.

    The check is exact in every precision: masked attention has weight 0, and so has its gradient. Parameters get no
    gradient.

    >>> check_packable(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B"))
    """
    name = type(model).__name__
    remedy = 'collate with padding="right", "left" or "split"'
    if getattr(model.config.get_text_config(), "attn_temperature_tuning", False):
        raise ValueError(f"{name} scales attention by the column, not by position_ids: {remedy}")
    first, second = _reach(model)
    if not second:
        raise RuntimeError(f"{name}: no gradient reaches the tokens that the logits are of; cannot check packing")
    if first:
        raise ValueError(f"{name} lets the sequences of a packed batch see each other: {remedy}")


def _reach(model: Any) -> tuple[bool, bool]:
    """Which of two packed sequences the logits of the second one depend on."""
    length = min(PROBE_TOKENS, getattr(model.config.get_text_config(), "max_position_embeddings", PROBE_TOKENS))
    embeddings = model.get_input_embeddings()
    device = embeddings.weight.device
    positions = torch.arange(length, device=device).repeat(2)[None]
    tokens = torch.arange(2 * length, device=device)[None] % embeddings.weight.shape[0]
    embedded: list[torch.Tensor] = []

    def leaf(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    handle = embeddings.register_forward_hook(leaf)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            (grad,) = torch.autograd.grad(logits[:, length:].float().sum(), embedded[-1])
    finally:
        handle.remove()
    reached = (grad != 0).any(-1)[0]
    return bool(reached[:length].any()), bool(reached[length:].any())
