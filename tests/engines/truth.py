"""What a trace of live vLLM must hold, computed by transformers in float32; and how vLLM is started for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollout import RouterReplay
from storage import Trace

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 200, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26,
    "max_num_batched_tokens": 64, "max_num_seqs": 16, "block_size": 32,
}  # fmt: skip
# With blocks of 32 tokens, instead of a CPU's 128, prompts of 40 and 90 have prefixes that can be cached.
# vLLM's CPU attention takes heads of at least 32
WIDER = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.08}
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(3, 96, size).tolist() for size in (1, 5, 40, 90)]


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def check(traces: list[Trace], plain: Any | dict[int, Any], top_p: float = 1.0, temperature: float = 1.0) -> None:
    """Routes equal transformers' row by row, logprobs within 1e-5, of the distribution sampled from.

    Slot by slot too, but for OLMoE, whose ids vLLM's CPU router returns in another order. `plain` is one model, or one
    per weight version: then each row and token is compared with that of its version.
    """
    assert traces
    for trace in traces:
        assert trace.error is None
        for version, start, end in trace.weight_versions:
            _check_rows(trace, plain[version] if isinstance(plain, dict) else plain, start, end, top_p, temperature)


@torch.no_grad()
def _check_rows(trace: Trace, plain: Any, start: int, end: int, top_p: float, temperature: float) -> None:
    first = len(trace.prompt_ids) - 1  # token j was sampled from row first + j
    with RouterReplay(plain).record() as recorded:
        logits = plain(torch.tensor([trace.token_ids[:-1]])).logits[0, first:].double() / temperature
    own = np.asarray(recorded.routed_experts).reshape(trace.routed_experts.shape)[start:end]
    found = trace.routed_experts[start:end]
    assert np.array_equal(np.sort(found), np.sort(own))
    assert np.array_equal(found, own) or plain.config.model_type == "olmoe"
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before < top_p)
    logprobs = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(trace.completion_ids)[:, None])[:, 0].numpy()
    mine = slice(max(0, start - first), max(0, end - first))
    assert np.abs(chosen - trace.logprobs)[mine].max(initial=0) < 1e-5
