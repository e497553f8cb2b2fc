"""vLLM as one more variant of `moe-rollout bench`: in this process, recording routes, as `RolloutClient` runs it."""

from __future__ import annotations

import time
from typing import Any

from rollout.canary import OUTPUT_TOKENS, PROMPT_TOKENS
from rollout.client import RolloutClient
from rollout.loader import load_config
from rollout.sampling import SamplingParams

KV_BYTES = 1 << 30
"""Both this and eager mode make vLLM skip a warm-up on a CPU; it holds 64 sequences of the random models."""


def start_vllm_client(path: str, device: str, batch: int, tokens: int) -> RolloutClient:
    """A client over vLLM with the dtype of the checkpoint, for `batch` sequences of `tokens` tokens.

    Raises:
        ImportError: vLLM is not installed; the message says how to.
    """
    options: dict[str, Any] = {
        "dtype": str(load_config(path, False).dtype or "float32").removeprefix("torch."),  # "auto" would halve float32
        "max_model_len": max(tokens, PROMPT_TOKENS + OUTPUT_TOKENS),
        "max_num_seqs": batch,
        "kv_cache_memory_bytes": KV_BYTES,
        "enforce_eager": device == "cpu",
    }
    return RolloutClient.local(path, backend="vllm", **options)


def sample_vllm(client: RolloutClient, prompts: list[list[int]], new_tokens: int, number: int) -> float:
    """Tokens per second of one round."""
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, seed=number)
    started = time.perf_counter()
    traces = client.sample(prompts, sampling_params=params)
    seconds = time.perf_counter() - started
    made = sum(len(trace.completion_ids) for trace in traces)
    if made != len(prompts) * new_tokens:
        raise RuntimeError(f"vLLM made {made} tokens, need {len(prompts) * new_tokens}: {traces[0].error}")
    return made / seconds
