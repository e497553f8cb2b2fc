"""Find the routers of a transformers MoE model from what the model itself declares. Needs no torch import.

Every MoE family names its router class in `_can_record_outputs["router_logits"]`; a router's own attributes
give the number of experts and K. The engine checks the result against the first forward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from storage.trace import Site


class FoundRouter(NamedTuple):
    """A router module and what it is in the route contract."""

    module: Any
    site: Site


def find_routers(model: Any) -> list[FoundRouter]:
    """The routers of `model` in execution order.

    Raises:
        ValueError: for a dense model, or a router that does not say how many experts it chooses among.
    """
    classes = tuple(_declared_router_classes(model))
    found = [
        FoundRouter(module, _site(name, module))
        for name, module in model.named_modules()
        if isinstance(module, classes)
    ]
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


def _site(name: str, module: Any) -> Site:
    num_experts = _first_int(module, ("num_experts", "n_routed_experts", "num_local_experts"))
    top_k = _first_int(module, ("top_k", "num_experts_per_tok"))
    if num_experts is None or top_k is None:
        raise ValueError(
            f"router {name} ({type(module).__name__}) does not say how many experts it chooses among; "
            "this family is not supported yet"
        )
    return Site(name, _layer_index(name), num_experts, top_k)


def _first_int(module: Any, names: tuple[str, ...]) -> int | None:
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    weight = getattr(module, "weight", None)
    return int(weight.shape[0]) if weight is not None and "num_experts" in names else None


def _layer_index(name: str) -> int:
    match = re.search(r"\.(\d+)\.", name)
    if match is None:
        raise ValueError(f"router {name} does not sit in a numbered decoder layer")
    return int(match.group(1))
