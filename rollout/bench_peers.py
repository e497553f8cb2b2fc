"""transformers' two ways to generate, as peers of `moe-rollout bench`: the same work as the engine's, and no more."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from rollout.loader import no_progress_bar

PAGE_TOKENS = 32  # the fastest of 16, 32, 64 and 256
MAX_BATCH_TOKENS = 2048  # as in EngineOptions

Generate = Callable[[list[list[int]], int, int], list[list[int]]]
"""`(prompts of one length, new tokens, seed) -> completions`"""


@contextlib.contextmanager
def open_peer(peer: str, path: str, device: str) -> Iterator[Generate]:
    """A model of its own, in the dtype of the checkpoint, sampling with one of PEERS."""
    with no_progress_bar():
        model: Any = AutoModelForCausalLM.from_pretrained(path).eval().to(device)

    def generate(prompts: list[list[int]], new_tokens: int, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return PEERS[peer](model, prompts, new_tokens)

    yield generate


def _config(model: Any, new_tokens: int, eos_token_id: int | None) -> GenerationConfig:
    """Temperature 1 over the whole vocabulary and no end before `new_tokens`, so that no logits processor and no stop
    criterion but the length runs. What a config leaves out, transformers takes from the model's: it gets the same."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(do_sample=True, max_new_tokens=new_tokens, eos_token_id=eos_token_id, **plain)
    model.generation_config = config
    return config


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    ids = torch.tensor(prompts, device=model.device)
    config = _config(model, new_tokens, None)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return out[:, ids.shape[1] :].tolist()


@torch.inference_mode()
def _generate_batch(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    config = _config(model, new_tokens, -1)  # None warns, and means -1
    sizes = _sizes(len(prompts), len(prompts[0]), new_tokens)
    out = model.generate_batch(prompts, generation_config=config, continuous_batching_config=sizes, progress_bar=False)
    return [request.generated_tokens for request in out.values()]


def _sizes(batch: int, prompt_len: int, new_tokens: int) -> ContinuousBatchingConfig:
    """Room for just these prompts. Left alone it fills nine tenths of the machine's memory, and is slower."""
    blocks = batch * math.ceil((prompt_len + new_tokens) / PAGE_TOKENS) + 1
    tokens = max(batch, min(MAX_BATCH_TOKENS, batch * prompt_len))
    return ContinuousBatchingConfig(page_size=PAGE_TOKENS, num_blocks=blocks, max_batch_tokens=tokens)


PEERS: dict[str, Callable[[Any, list[list[int]], int], list[list[int]]]] = {
    "generate": _generate,
    "generate_batch": _generate_batch,
}
