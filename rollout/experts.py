"""Experts implementations of our own, registered through transformers' public experts interface.

`hit_experts` sorts the (token, slot) pairs by expert and runs one pair of matrix products per expert that was hit;
transformers' CPU `grouped_mm` visits all experts. `batch_invariant_experts` pads each group to at least 16 rows: from
there on a row's bits do not depend on how many rows share the product (checked at start, see self_test.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

MIN_ROWS = 16


def hit_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Expert outputs `[tokens, hidden]` for ids and weights `[tokens, K]`; one GEMM pair per hit expert."""
    return _by_expert(self, hidden, top_k_index, top_k_weights, min_rows=1)


def batch_invariant_experts(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The same with every GEMM at least 16 rows high."""
    return _by_expert(self, hidden, top_k_index, top_k_weights, min_rows=MIN_ROWS)


def _by_expert(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, min_rows: int
) -> torch.Tensor:
    tokens, slots = top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=self.num_experts).tolist()
    if len(counts) > self.num_experts:
        raise ValueError(
            f"expert id {len(counts) - 1} for {self.num_experts} experts; use experts_implementation='eager'"
        )
    sorted_hidden = hidden[order // slots]
    sorted_out = torch.empty_like(sorted_hidden)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            sorted_out[rows] = _one_expert(self, expert, sorted_hidden[rows], min_rows)
            start += count
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    weighted = out.view(tokens, slots, -1) * top_k_weights.unsqueeze(-1)
    return weighted.sum(dim=1).to(hidden.dtype)


def _one_expert(self: Any, expert: int, rows: torch.Tensor, min_rows: int) -> torch.Tensor:
    count = len(rows)
    if count < min_rows:
        rows = F.pad(rows, (0, 0, 0, min_rows - count))
    projected = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", expert, rows)
    activated = self._apply_gate(projected) if self.has_gate else self.act_fn(projected)
    out = _linear(self, "down_proj", expert, activated)
    return (self.post_expert_norm(out) if self.has_post_expert_norm else out)[:count]


def _linear(self: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(self, name)[expert]
    bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
    return F.linear(rows, weight.t() if self.is_transposed else weight, bias)


def use_experts_implementation(model: Any, name: str) -> None:
    """Switch `model` to the experts implementation `name`, ours or transformers'."""
    ALL_EXPERTS_FUNCTIONS.register("hit_experts", hit_experts)
    ALL_EXPERTS_FUNCTIONS.register("batch_invariant_experts", batch_invariant_experts)
    model.set_experts_implementation(name)
