"""What a request's trace must be, from the log of what was computed when: plain transformers in fp32, token by token.

Keys and values are filled with the weights that were current when the engine filled them, in a cache of transformers.
A row that is computed for the first time must be the native choice, with only the rows before it forced; one that is
computed again is forced. Nothing of the engine is used: a forward hook replaces what the routers return.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from rollout import SamplingParams
from rollout.own_cache import cache_keyword
from storage import Trace
from tests.rollout.oracle import NEAR_TIE, log_softmax, logprob_error

TOLERANCE = 1e-4


class Computed(NamedTuple):
    """Positions `[start, end)` of a request, computed with one version of the weights."""

    start: int
    end: int
    version: int


class LifecycleOracle:
    """A Qwen3-MoE checkpoint whose weights of version v are the checkpoint's times `1 + v % 3 / 50`."""

    def __init__(self, path: str | Path) -> None:
        self._models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for _ in range(3)]
        for version, model in enumerate(self._models):
            model.load_state_dict(self.weights(version))
            for site, layer in enumerate(model.model.layers):
                layer.mlp.gate.register_forward_hook(self._hook(site))
        self._forced: np.ndarray | None = None
        self._seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """The state dict of a version."""
        if not hasattr(self, "_base"):
            self._base = {name: tensor.clone() for name, tensor in self._models[0].state_dict().items()}
        return {name: tensor * (1 + version % 3 / 50) for name, tensor in self._base.items()}

    def _hook(self, site: int) -> Any:
        def hook(module: Any, _args: Any, out: Any) -> Any:
            self._seen[site] = out[2][0].numpy().copy(), out[0][0].double().numpy()
            if self._forced is None:
                return None
            ids = torch.from_numpy(self._forced[site].astype(np.int64))[None]
            weights = out[0].softmax(-1).gather(-1, ids)
            if module.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return out[0], weights, ids

        return hook

    @torch.inference_mode()
    def _token(self, token: int, at: int, version: int, cache: DynamicCache, forced: np.ndarray | None) -> np.ndarray:
        self._forced = forced
        ids, position = torch.tensor([[token]]), torch.tensor([[at]])
        model = self._models[version % 3]
        out = model(input_ids=ids, position_ids=position, use_cache=True, **{cache_keyword(model): cache})
        return out.logits[0, -1].double().numpy()

    def check(self, trace: Trace, known_rows: int, known_tokens: int, log: Sequence[Computed]) -> None:
        """AssertionError naming the row or token that is not as it must be.

        `known_rows` and `known_tokens`: what the trace began with, recorded elsewhere.
        """
        rows, versions = (
            trace.num_rows,
            np.concatenate([[s.version] * (s.row_end - s.row_start) for s in trace.weight_versions]),
        )
        assert trace.route_len == rows - trace.route_start if trace.routed_experts is not None else not rows
        cache, at, seen = DynamicCache(), 0, known_rows
        for work in log:
            if work.start < at:
                cache, at = DynamicCache(), 0
            for position in range(at, min(work.end, rows)):  # from `at` to `start`: copied from a like prefix
                first, seen = position >= seen, max(seen, position + 1)
                logits = self._row(trace, position, work.version, cache, first)
                if first:
                    assert versions[position] == work.version, f"{trace.sample_id}: row {position} has another version"
                    self._check_logprob(trace, position + 1 - len(trace.prompt_ids), logits, known_tokens)
            at = max(at, min(work.end, rows))
        assert seen >= rows, f"{trace.sample_id}: rows {seen}..{rows} were never computed"

    def _row(self, trace: Trace, at: int, version: int, cache: DynamicCache, first: bool) -> np.ndarray:
        assert trace.routed_experts is not None
        recorded = trace.routed_experts[at - trace.route_start] if at >= trace.route_start else None
        if not first:
            return self._token(trace.token_ids[at], at, version, cache, recorded)
        logits = self._token(trace.token_ids[at], at, version, cache, None)
        if recorded is not None and not self._is_native(trace, at, recorded):
            cache.crop(at)
            logits = self._token(trace.token_ids[at], at, version, cache, recorded)
        return logits

    def _is_native(self, trace: Trace, at: int, recorded: np.ndarray) -> bool:
        """False at a near-tie, which is proven here."""
        for site, (ids, scores) in sorted(self._seen.items()):
            if not np.array_equal(ids, recorded[site]):
                gap = np.abs(scores[ids] - scores[recorded[site]]).max()
                where = f"{trace.sample_id}: row {at}, site {site}"
                assert gap < 10 * NEAR_TIE, f"{where} is {recorded[site]}, natively {ids}; the gap is {gap:.1e}"
                return False
        return True

    @staticmethod
    def _check_logprob(trace: Trace, completion_at: int, logits: np.ndarray, known_tokens: int) -> None:
        if not known_tokens <= completion_at < len(trace.completion_ids):
            return
        token, params = trace.completion_ids[completion_at], SamplingParams(**trace.sampling_params)
        assert trace.raw_logprobs is not None
        assert abs(trace.raw_logprobs[completion_at] - log_softmax(logits)[token]) < TOLERANCE
        assert logprob_error(trace.logprobs[completion_at], token, logits, params) < TOLERANCE
