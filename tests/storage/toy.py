"""Two routers in layers 0 and 2 of a decoder of three layers, 4 experts, top 2; two traces written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from storage import RoutingSpec, Site, Trace

TOY = RoutingSpec((Site("layers.0.gate", 0, 4, 2), Site("layers.2.gate", 2, 4, 2)))
LONG_IDS = [[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[3, 1], [0, 2]]]
SHORT_IDS = [[[2, 0], [1, 3]]]


def toy_trace(name: str, prompt: list[int], completion: list[int], ids: Any, **fields: Any) -> Trace:
    return Trace(
        sample_id=name,
        step=0,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=-np.arange(1.0, len(completion) + 1),
        routed_experts=np.array(ids, np.uint8),
        **({"finish_reason": "length"} | fields),
    )


def long_trace() -> Trace:
    """Tokens 11 12 | 13 14, three rows."""
    return toy_trace("long", [11, 12], [13, 14], LONG_IDS)


def short_trace() -> Trace:
    """Tokens 21 | 22, one row."""
    return toy_trace("short", [21], [22], SHORT_IDS)


def holed_trace() -> Trace:
    """Tokens 11 12 | 13 14, of which only the row of 12 is recorded."""
    ids = [LONG_IDS[1], np.zeros((2, 2))]
    return toy_trace("holed", [11, 12], [13, 14], ids, route_start=1, route_valid=[True, False])
