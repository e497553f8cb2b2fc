"""Checks of a trace that came from outside. What fails is an error that names the request, never a trace."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from storage.trace import RoutingSpec, Trace

logger = logging.getLogger(__name__)
MANY_ROWS = 64
"""Zeros at one router in so many rows are suspicious. Where one expert is chosen, as in llama4, they can be real all
the same: nothing keeps a router from sending every token of a text to expert 0."""


def validate_trace(trace: Trace, spec: RoutingSpec, logprob_ids: Sequence[int] | None = None) -> Trace:
    """Return `trace` with its routes in `spec.dtype`, if an engine can have meant it.

    >>> validate_trace(trace, RoutingSpec.uniform(num_sites=2, num_experts=8, top_k=2), logprob_ids=[9, 2]) is trace
    True

    Args:
        logprob_ids: the token ids to which the engine says that the logprobs belong.

    Raises:
        ValueError: naming the sample, when rows or spans do not cover the tokens, ids are out of range or double in a
            row, all routes are zero, logprobs are not finite, above 0 or of other tokens, or
            routes are missing behind a first token.
    """
    name = f"trace {trace.sample_id!r}"
    trace.check()
    if logprob_ids is not None and list(logprob_ids) != trace.completion_ids:
        raise ValueError(
            f"{name}: logprobs belong to tokens {_head(logprob_ids)}, output {_head(trace.completion_ids)}"
        )
    for position in np.flatnonzero(~(np.isfinite(trace.logprobs) & (trace.logprobs <= 1e-4))):
        raise ValueError(f"{name}: logprob of completion token {position} is {trace.logprobs[position]}")
    if trace.routed_experts is None:
        if trace.num_rows:
            raise ValueError(f"{name}: no routed_experts for {trace.num_rows} rows")
        return trace
    routes = trace.routed_experts = spec.check_routes(trace.routed_experts, name=name)
    valid = routes if trace.route_valid is None else routes[trace.route_valid]
    if valid.size > 16 and not valid.any():
        raise ValueError(f"{name}: every id of its {len(valid)} rows is 0: routes were not captured")
    for index, site in enumerate(spec.sites):
        ids, where = valid[:, index, : site.top_k], f"{name}: site {index} ({site.name})"
        _check_site(ids, where)
        if len(ids) >= MANY_ROWS and site.num_experts > 1 and not ids.any():
            logger.warning("%s chose expert 0 in all of %d rows: was that layer captured?", where, len(ids))
    return trace


def _check_site(ids: np.ndarray, where: str) -> None:
    """ids [rows, K] of one site. With K > 1 a row of zeros holds 0 twice."""
    ordered = np.sort(ids, axis=-1)
    double = (ordered[:, 1:] == ordered[:, :-1]).any(axis=-1)
    if double.any():
        row = int(double.argmax())
        raise ValueError(f"{where} has an id twice in row {row}: {ids[row].tolist()}; was that row captured at all?")


def _head(ids: Sequence[int]) -> str:
    return f"{list(ids)[:4]}{'...' if len(ids) > 4 else ''} ({len(ids)})"
