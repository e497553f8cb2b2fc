"""What plain transformers and float64 arithmetic say: the truth that engine tests compare with.

The default mode of the engine promises equality in fp32 except at proven near-ties. `tokens_agree` and `routes_agree`
are that proof: at the first difference the two candidates must be closer than `NEAR_TIE` in the oracle, and the rest of
the sequence is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollout import SamplingParams
from storage import Trace

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "granitemoe")
NEAR_TIE = 1e-5


class Forward(NamedTuple):
    """One forward of T tokens: float64 logits `[T, vocab]`, ids `[T, sites, K]`, router logits `[T, sites, E]`."""

    logits: np.ndarray
    routes: np.ndarray
    router_logits: np.ndarray


class Oracle:
    """A checkpoint as transformers runs it: own cache, own attention, own experts."""

    def __init__(self, path: str | Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._routers = [m for m in self.model.modules() if type(m).__name__.endswith("Router")]

    def greedy(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
        """The completion that `model.generate` gives for one prompt alone."""
        ids = torch.tensor([list(prompt)])
        mask = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **options)
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> Forward:
        """All tokens in one forward without a cache; forward hooks see what the routers return."""
        seen: list[Any] = []
        handles = [router.register_forward_hook(lambda _m, _args, out: seen.append(out)) for router in self._routers]
        logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        for handle in handles:
            handle.remove()
        routes = torch.stack([out[2] for out in seen], 1).numpy()
        router_logits = torch.stack([out[0] for out in seen], 1).double().numpy()
        return Forward(logits.double().numpy(), routes, router_logits)


def tokens_agree(oracle: Oracle, prompt: Sequence[int], found: Sequence[int], expected: Sequence[int]) -> bool:
    """True when equal, False when a proven near-tie ended the comparison; AssertionError for any other difference."""
    if list(found) == list(expected):
        return True
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
    assert at is not None, f"one completion is only the start of the other: {found}, {expected}"
    logits = oracle.forward([*prompt, *expected[:at]]).logits[-1]
    gap = abs(logits[expected[at]] - logits[found[at]])
    assert gap < NEAR_TIE, f"completion token {at} is {found[at]}, not {expected[at]}; the oracle's gap is {gap:.1e}"
    return False


def routes_agree(truth: Forward, found: np.ndarray) -> bool:
    """The same for routes `[rows, sites, K]`, ids and order, against the first rows of `truth`."""
    expected = truth.routes[: len(found)]
    assert found.shape == expected.shape
    different = np.argwhere((found != expected).any(-1))
    if not len(different):
        return True
    row, site = different[0]
    got, want = found[row, site], expected[row, site]
    logits = truth.router_logits[row, site]
    gap = abs(logits[got] - logits[want]).max()
    assert gap < NEAR_TIE, f"row {row}, site {site} is {got}, not {want}; the oracle's gap is {gap:.1e}"
    return False


def rows_of(trace: Trace) -> int:
    """Rows a whole trace must have: every token but the last sampled one was an input."""
    return len(trace.token_ids) - 1 if trace.completion_ids else len(trace.prompt_ids)


def check_trace(oracle: Oracle, trace: Trace) -> bool:
    """Routes and logprobs of a finished trace against one forward; False when a near-tie of routes ended it."""
    truth = oracle.forward(trace.token_ids)
    assert trace.routed_experts is not None
    assert len(trace.routed_experts) == rows_of(trace)
    if not routes_agree(truth, trace.routed_experts):
        return False
    params = SamplingParams(**trace.sampling_params)
    for at, token in enumerate(trace.completion_ids):
        logits = truth.logits[len(trace.prompt_ids) + at - 1]
        assert abs(trace.raw_logprobs[at] - log_softmax(logits)[token]) < 1e-5
        assert logprob_error(trace.logprobs[at], token, logits, params) < 1e-5
    return True


def mostly(agreed: Sequence[bool]) -> bool:
    """Near-ties are about one sequence in a hundred; many of them would mean that the proof is too weak."""
    return sum(agreed) >= 0.9 * len(agreed) - 1


def check_greedy(oracle: Oracle, traces: Sequence[Trace]) -> None:
    """Every delivered token, route and logprob of traces whose end token was ignored is the oracle's."""
    agreed = []
    for trace in traces:
        expected = oracle.greedy(trace.prompt_ids, len(trace.completion_ids), eos_token_id=None)
        agreed += [tokens_agree(oracle, trace.prompt_ids, trace.completion_ids, expected), check_trace(oracle, trace)]
    assert mostly(agreed)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64 log-probabilities of `[vocab]` logits; -inf stays -inf."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def log_distribution(logits: np.ndarray, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Log-probabilities `[vocab]` a token is drawn from: temperature, then min_p, then top_k, then top_p.

    `slack` shifts the thresholds of min_p and top_p.

    >>> log_distribution(np.log([0.5, 0.3, 0.2]), SamplingParams(top_p=0.6)).round(3).tolist()
    [-0.47, -0.981, -inf]
    """
    if params.temperature == 0:
        return log_softmax(logits)
    scaled = logits / params.temperature
    probs = np.exp(log_softmax(scaled))
    kept = [token for token in np.argsort(-scaled, kind="stable") if probs[token] >= params.min_p * probs.max() + slack]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(probs[kept]), 0.0, []
    for token in kept:
        if mass >= params.top_p + slack:
            break
        nucleus.append(token)
        mass += probs[token] / total
    masked = np.full_like(scaled, -np.inf)
    masked[nucleus] = scaled[nucleus]
    return log_softmax(masked)


def logprob_error(found: float, token: int, logits: np.ndarray, params: SamplingParams) -> float:
    """Distance to the oracle's log-probability; with a threshold within 1e-6 of a token either side is right."""
    return min(abs(found - log_distribution(logits, params, slack)[token]) for slack in (0.0, 1e-6, -1e-6))
