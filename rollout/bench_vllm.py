"""vLLM as one more variant of `moe-rollout bench`: in this process, recording routes, as `RolloutClient` runs it."""

from __future__ import annotations

from typing import Any

from torch import set_num_threads

from rollout.canary import OUTPUT_TOKENS, PROMPT_TOKENS
from rollout.client import RolloutClient
from rollout.loader import load_config

KV_BYTES = 1 << 30
"""Both this and eager mode make vLLM skip a warm-up on a CPU; it holds 64 sequences of the random models."""


def open_vllm(path: str, device: str, batch: int, tokens: int, threads: int) -> RolloutClient:
    """A client over vLLM with the dtype of the checkpoint, for `batch` sequences of `tokens` tokens.

    vLLM binds its threads to no cores here (VLLM_CPU_OMP_THREADS_BIND=nobind): the thread which runs it computes with
    as many as torch was set to before it began.

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
    set_num_threads(threads)
    return RolloutClient.local(path, backend="vllm", **options)
