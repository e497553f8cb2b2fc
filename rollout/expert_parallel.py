"""Experts divided among ranks, inside an unmodified model: one experts function, and two hooks per MoE block.

`alltoall`: routers see local tokens. A token's row travels to each rank that holds one of its experts, and the output
travels back. `allgather`: blocks see the tokens of all ranks, gathered before them; each rank computes the pairs of its
own experts, and every rank gets the partial outputs of its own rows. All that travels does so inside the experts
function or before the block. Shared experts, which sit beside the routed ones, every rank has whole: in `alltoall` it
computes them for its own rows, in `allgather` for the rows of all, of which all but its own are cut off behind the
block. Either way they count once. Partial outputs are added in the order of ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from rollout.experts import Layout, experts_output
from rollout.packed_experts import is_experts
from rollout.parallel import ExpertRange, RankGroup
from storage.sites import find_routers

EXPERTS_NAME = "moe_rollout_expert_parallel"


def local_pairs(ids: torch.Tensor, experts: ExpertRange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The (token, slot) pairs of a rank's experts: token, slot, and the expert counted from the rank's first."""
    token, slot = ((ids >= experts.start) & (ids < experts.end)).nonzero(as_tuple=True)
    return token, slot, ids[token, slot] - experts.start


def partial_output(
    self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertRange, layout: Layout
) -> torch.Tensor:
    """What this rank's experts add to `[tokens, hidden]`; tokens that chose none of them get zeros."""
    token, slot, expert = local_pairs(ids, experts)
    out = hidden.new_zeros((*ids.shape, hidden.shape[-1]))
    if len(token):
        out[token, slot] = experts_output(self, hidden[token], expert[:, None], weights[token, slot][:, None], layout)
    return out.sum(dim=1)


def alltoall_output(
    self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: RankGroup, layout: Layout
) -> torch.Tensor:
    """Local tokens in, local tokens out; a token's row goes once to each rank that holds one of its experts."""
    site = self.expert_parallel_name
    each = self.expert_range.end - self.expert_range.start
    owner = ids // each  # an id behind the last expert (one that does nothing) has no owner
    rows = [(owner == rank).any(-1).nonzero()[:, 0] for rank in range(group.size)]
    sent = [len(r) for r in rows]
    received = group.exchange_counts(sent, f"row counts of {site}")
    chosen = torch.cat(rows)
    packed = _pack(hidden[chosen], ids[chosen], weights[chosen])
    arrived = torch.cat(group.all_to_all_rows(packed, sent, received, f"expert inputs of {site}"))
    their_hidden, their_ids, their_weights = _unpack(arrived, hidden, ids, weights)
    outputs = partial_output(self, their_hidden, their_ids, their_weights, self.expert_range, layout)
    returned = group.all_to_all_rows(outputs, received, sent, f"expert outputs of {site}")
    out = torch.zeros_like(hidden)
    for row, part in zip(rows, returned, strict=True):
        out[row] += part
    return out


def allgather_output(
    self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, group: RankGroup, layout: Layout
) -> torch.Tensor:
    """Tokens of all ranks in; out come this rank's rows, the others' are zero and cut off behind the block."""
    counts = list(group.shape.rows)
    partial = partial_output(self, hidden, ids, weights, self.expert_range, layout)
    mine = [counts[group.rank]] * group.size
    parts = group.all_to_all_rows(partial, counts, mine, f"partial outputs of {self.expert_parallel_name}")
    out = torch.zeros_like(hidden)
    start = sum(counts[: group.rank])
    for part in parts:
        out[start : start + len(part)] += part
    return out


def _experts_forward(
    self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Registered with transformers' experts interface; what a module needs of its group was noted on it."""
    group: RankGroup = self.expert_parallel_group
    compute = alltoall_output if group.layout == "alltoall" else allgather_output
    return compute(self, hidden, top_k_index, top_k_weights, group, self.expert_parallel_layout)


def use_expert_parallel(model: Any, group: RankGroup, layout: Layout) -> None:
    """Let a model whose experts were loaded in part (sharded_loader.py) run as one rank of `group`.

    Args:
        layout: of each expert's rows, see experts.py.

    Raises:
        ValueError: for a family whose experts do not go through transformers' experts interface, or with `allgather`
            for one without a block of router and experts alone, by name.
    """
    routers = find_routers(model)
    modules = dict(model.named_modules())
    blocks = {name: module for name, module in modules.items() if _holds_experts(module)}
    for router in routers:
        block = router.site.name.rpartition(".")[0]
        if block not in blocks:
            raise ValueError(
                f"{type(model).__name__}: {block!r} has no experts of transformers' experts interface beside its "
                "router; this family cannot be divided among ranks, use dp_size=1"
            )
        if group.layout == "allgather" and isinstance(blocks[block], GradientCheckpointingLayer):
            raise ValueError(
                f"{type(model).__name__}: {block!r}, which holds router and experts, is a whole decoder layer, whose "
                "attention is to see this rank's tokens only; use moe_dispatch='alltoall', or dp_size=1"
            )
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts_forward)
    model.set_experts_implementation(EXPERTS_NAME)
    for name, block in blocks.items():
        for child_name, child in block.named_children():
            if is_experts(child):
                child.expert_parallel_group = group
                child.expert_parallel_name = f"{name}.{child_name}"
                child.expert_parallel_layout = layout
        if group.layout == "allgather":
            block.register_forward_pre_hook(functools.partial(_gather, group, name), with_kwargs=True)
            block.register_forward_hook(functools.partial(_own_rows, group))


def _holds_experts(module: Any) -> bool:
    return any(is_experts(child) for child in module.children())


def _gather(group: RankGroup, name: str, block: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Hidden states `[1, rows, hidden]` of this rank become those of all ranks; per-token arguments too."""

    count = group.shape.rows[group.rank]

    def gathered(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.shape[:2] == (1, count):
            return group.all_gather_rows(value[0], f"the inputs of {name}")[None]
        return group.all_gather_rows(value, f"the inputs of {name}") if value.shape[:1] == (count,) else value

    return tuple(gathered(value) for value in args), {key: gathered(value) for key, value in kwargs.items()}


def _own_rows(group: RankGroup, block: Any, args: Any, output: Any) -> Any:
    """The rows of this rank of everything that the block returns."""
    counts = group.shape.rows
    start = sum(counts[: group.rank])
    total = group.shape.total_rows

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        rows = slice(start, start + counts[group.rank])
        if value.ndim == 3 and value.shape[:2] == (1, total):
            return value[:, rows]
        return value[rows] if value.shape[0] == total else value

    return tuple(own(value) for value in output) if isinstance(output, tuple) else own(output)


def _pack(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One byte row per token, so that a row, its ids and its weights travel in one message."""
    parts = (hidden, ids, weights)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(rows: torch.Tensor, *like: torch.Tensor) -> list[torch.Tensor]:
    sizes = [part.shape[-1] * part.element_size() for part in like]
    columns = rows.split(sizes, dim=1)
    return [column.contiguous().view(part.dtype) for column, part in zip(columns, like, strict=True)]
