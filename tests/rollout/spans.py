"""The truth about a trace whose weights changed while its keys and values were kept: plain transformers, own cache.

Each span of rows is computed with that span's weights, over the cache that the spans before have filled. Rows are the
model's own choice there, and logprobs are those of the row that each token was sampled from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from rollout import SamplingParams
from storage import Trace
from tests.rollout.oracle import NEAR_TIE, Oracle, logprob_error


def check_kept_spans(oracles: Mapping[int, Oracle], trace: Trace, tolerance: float = 1e-4) -> None:
    """Logprobs within `tolerance` and rows natively chosen, up to the first proven near-tie of a route."""
    tokens = torch.tensor([trace.token_ids])
    cache = DynamicCache()
    assert trace.routed_experts is not None
    for version, start, end in trace.weight_versions:
        logits, scores, routes = _span(oracles[version], tokens[:, start:end], start, cache)
        for row in range(start, end):
            if not _same_route(trace.routed_experts[row], routes[row - start], scores[row - start], row):
                return
            at = row + 1 - len(trace.prompt_ids)
            if at >= 0:
                _check_logprobs(trace, at, logits[row - start], tolerance)


@torch.inference_mode()
def check_recomputed(oracle: Oracle, trace: Trace, tolerance: float = 1e-4) -> None:
    """The rows of the last span, over keys and values of its own weights under the earlier rows, which are forced."""
    rows, (_, start, end) = trace.routed_experts, trace.weight_versions[-1]
    assert rows is not None
    cache = DynamicCache()
    routers = [m for m in oracle.model.modules() if type(m).__name__.endswith("Router")]
    handles = [r.register_forward_hook(_forced(rows[:start, site])) for site, r in enumerate(routers)]
    oracle.model(torch.tensor([trace.token_ids[:start]]), cache=cache, use_cache=True)
    for handle in handles:
        handle.remove()
    logits, scores, routes = _span(oracle, torch.tensor([trace.token_ids[start:end]]), start, cache)
    for row in range(start, end):
        if not _same_route(rows[row], routes[row - start], scores[row - start], row):
            return
        if (at := row + 1 - len(trace.prompt_ids)) >= 0:
            _check_logprobs(trace, at, logits[row - start], tolerance)


def _forced(ids: np.ndarray) -> Callable[[Any, Any, Any], Any]:
    """A hook for Qwen3-MoE's router: these experts, with the weights that its own scores give them."""

    def hook(router: Any, _args: Any, out: Any) -> Any:
        chosen = torch.from_numpy(ids.astype(np.int64))
        weights = out[0].softmax(-1, dtype=torch.float32).gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return (out[0], weights, chosen)

    return hook


@torch.inference_mode()
def _span(
    oracle: Oracle, tokens: torch.Tensor, start: int, cache: DynamicCache
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    seen: list[tuple[torch.Tensor, ...]] = []
    routers = [m for m in oracle.model.modules() if type(m).__name__.endswith("Router")]
    handles = [router.register_forward_hook(lambda _m, _args, out: seen.append(out)) for router in routers]
    positions = torch.arange(start, start + tokens.shape[1])[None]
    logits = oracle.model(tokens, position_ids=positions, cache=cache, use_cache=True).logits[0]
    for handle in handles:
        handle.remove()
    routes = torch.stack([out[2] for out in seen], 1).numpy()
    return logits.double().numpy(), torch.stack([out[0] for out in seen], 1).double().numpy(), routes


def _same_route(found: np.ndarray, native: np.ndarray, scores: np.ndarray, row: int) -> bool:
    for site, (got, want) in enumerate(zip(found, native, strict=True)):
        if not np.array_equal(got, want):
            gap = abs(scores[site][got] - scores[site][want]).max()
            assert gap < NEAR_TIE, f"row {row}, site {site} is {got}, not {want}; the oracle's gap is {gap:.1e}"
            return False
    return True


def _check_logprobs(trace: Trace, at: int, logits: np.ndarray, tolerance: float) -> None:
    token, params = trace.completion_ids[at], SamplingParams(**trace.sampling_params)
    assert logprob_error(trace.logprobs[at], token, logits, params) < tolerance, f"completion token {at}"
