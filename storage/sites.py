"""Find the routers of a transformers MoE model from what the model itself declares. Needs no torch import.

Every MoE family names its router class in `_can_record_outputs["router_logits"]`; a router's own attributes
give the number of experts and K. The engine checks the result against the first forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from storage.trace import Site

NUM_EXPERTS = ("num_router_classes", "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("top_k", "num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_k")


class FoundRouter(NamedTuple):
    """The module whose forward makes the choice, and what it is in the route contract.

    It is the router, or, for a router that only scores (dbrx), the block around it.
    """

    module: Any
    site: Site


def find_routers(model: Any) -> list[FoundRouter]:
    """The routers of `model` in execution order: by layer, and within a layer attention (jetmoe) first.

    Raises:
        ValueError: for a dense model, or a router that does not say how many experts it chooses among.
    """
    classes = tuple(_declared_router_classes(model))
    modules = dict(model.named_modules())
    found = [
        _found(name, module, modules[name.rpartition(".")[0]])
        for name, module in modules.items()
        if isinstance(module, classes)
    ]
    found.sort(key=lambda router: (router.site.layer, "attention" not in router.site.name))
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no MoE router: it is dense, or its family does not declare "
            "`_can_record_outputs['router_logits']`. Use a mixture-of-experts checkpoint such as Qwen3-MoE"
        )
    return found


def _declared_router_classes(model: Any) -> Iterator[type]:
    for module in model.modules():
        declared = getattr(type(module), "_can_record_outputs", None)
        recorders = declared.get("router_logits") if isinstance(declared, dict) else None
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            target = recorder if isinstance(recorder, type) else getattr(recorder, "target_class", None)
            if isinstance(target, type):
                yield target


def _found(name: str, router: Any, parent: Any) -> FoundRouter:
    num_experts = _num_ids(router) or _rows_of_weight(router)
    top_k = _first_int(router, TOP_K)
    owner = router
    if top_k is None:
        owner, top_k = parent, _first_int(parent, TOP_K)
    if num_experts is None or top_k is None:
        raise ValueError(
            f"router {name} ({type(router).__name__}) does not say how many experts it chooses among; "
            "this family is not supported yet"
        )
    return FoundRouter(owner, Site(name, _layer_index(name), num_experts, top_k))


def _num_ids(router: Any) -> int | None:
    """The largest of the numbers that the router gives: beside experts it may choose to do nothing (longcat, zaya)."""
    own = [value for name in NUM_EXPERTS if isinstance(value := getattr(router, name, None), int)]
    return max(own) if own else _first_int(router, NUM_EXPERTS)


def _first_int(module: Any, names: tuple[str, ...]) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


def _rows_of_weight(module: Any) -> int | None:
    """A router's scores have one column per expert: the rows of its weight, or of its only linear layer."""
    matrices = [weight for weight in module.parameters() if weight.ndim == 2]
    return int(matrices[0].shape[0]) if len(matrices) == 1 else None


def _layer_index(name: str) -> int:
    match = re.search(r"\.(\d+)\.", name)
    if match is None:
        raise ValueError(f"router {name} does not sit in a numbered decoder layer")
    return int(match.group(1))
