"""ReplayBatch as torch tensors. The only module of storage that needs torch; it is imported when called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from storage.batch import ReplayBatch


def array_names(batch: ReplayBatch) -> list[str]:
    """Names of the fields of `batch` that are arrays."""
    return [field.name for field in fields(batch) if isinstance(getattr(batch, field.name), np.ndarray)]


def tensors(
    batch: ReplayBatch, names: Sequence[str], device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """The named arrays as tensors; on the CPU they share memory with the arrays."""
    return {name: torch.from_numpy(getattr(batch, name)).to(device) for name in names}


def token_logprobs(batch: ReplayBatch, logits: torch.Tensor) -> torch.Tensor:
    """Log-probability of each sampled token under `logits`, differentiable.

    The token in column t is scored by the log-softmax, in float32, of the logits in column t - 1. To compare
    with `batch.logprobs` at a sampling temperature other than 1, pass `logits / temperature`.

    >>> loss = -(advantages[:, None] * batch.token_logprobs(model(**batch.model_inputs()).logits)).sum()

    Args:
        logits: `[B, S, V]`, of a forward over `batch.model_inputs()`.

    Returns:
        float32 `[B, S]` on the device of `logits`, 0 where no token was sampled, aligned like
        `batch.raw_logprobs`.
    """
    if logits.shape[:2] != batch.input_ids.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for input_ids of shape {batch.input_ids.shape}")
    mask = torch.from_numpy(batch.completion_mask).to(logits.device)
    sampled = torch.from_numpy(batch.input_ids).to(logits.device)[mask]
    distributions = logits[:, :-1][mask[:, 1:]].float().log_softmax(-1)
    result = torch.zeros(mask.shape, dtype=torch.float32, device=logits.device)
    return result.masked_scatter(mask, distributions.gather(-1, sampled[:, None]).squeeze(-1))
