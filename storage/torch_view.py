"""ReplayBatch as torch tensors. The only module of storage that needs torch; it is imported when called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

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


def model_inputs(batch: ReplayBatch, device: torch.device | str | None = None) -> dict[str, Any]:
    """Arguments of a transformers forward; see `ReplayBatch.model_inputs`."""
    if batch.cu_seqlens is None:
        return tensors(batch, ("input_ids", "attention_mask", "position_ids"), device)
    return {**tensors(batch, ("input_ids", "position_ids"), device), "use_cache": False}


def token_logprobs(batch: ReplayBatch, logits: torch.Tensor) -> torch.Tensor:
    """Log-probability of each sampled token under `logits`, differentiable.

    The token in column t is scored by the log-softmax, in float32, of the logits in column t - 1. To compare
    with `batch.logprobs` at a sampling temperature other than 1, pass `logits / temperature`.

    >>> logprobs = batch.token_logprobs(model(**batch.model_inputs()).logits)
    >>> loss = -(torch.from_numpy(batch.advantages * batch.loss_mask) * logprobs).sum()

    Args:
        logits: `[R, S, V]`, of a forward over `batch.model_inputs()`.

    Returns:
        float32 `[R, S]` on the device of `logits`, 0 where no token was sampled, aligned like
        `batch.raw_logprobs`.

    Raises:
        ValueError: for logits of another shape, or a context-parallel shard, where column t - 1 may be elsewhere.
    """
    if batch.cp_size != 1:
        raise ValueError(
            f"a shard of cp_size {batch.cp_size} lacks the logits before its first column; gather them, or shift the "
            "tokens of the whole batch by one before sharding"
        )
    if logits.shape[:2] != batch.input_ids.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} for input_ids of shape {batch.input_ids.shape}")
    mask = torch.from_numpy(batch.completion_mask).to(logits.device)
    sampled = torch.from_numpy(batch.input_ids).to(logits.device)[mask]
    distributions = logits[:, :-1][mask[:, 1:]].float().log_softmax(-1)
    result = torch.zeros(mask.shape, dtype=torch.float32, device=logits.device)
    return result.masked_scatter(mask, distributions.gather(-1, sampled[:, None]).squeeze(-1))
