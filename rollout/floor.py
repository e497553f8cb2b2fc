"""What a machine can do at best, to hold a step against: bytes read and operations per second, as torch does them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import set_num_threads  # vLLM on a CPU replaces torch.set_num_threads by a function that does nothing

from storage.sites import find_routers

READ_BYTES = 2**30  # the caches of a server that many share hold hundreds of megabytes
GEMM_SIZE = 2048
REPEATS = 5


class Floor(NamedTuple):
    """Bytes per second that a sum or a matrix-vector product reads, whichever is faster, and operations per second of a
    square matrix product.

    >>> floor = Floor(read=11.4e9, flops=137e9)
    >>> f"{1e3 * floor.seconds_to_read(57e6):.1f} ms"
    '5.0 ms'
    """

    read: float
    flops: float

    def seconds_to_read(self, size: float) -> float:
        """Seconds that reading `size` bytes takes at least."""
        return size / self.read

    def best(self, other: Floor) -> Floor:
        """Of two measurements the faster: what else runs on the machine can only slow one down."""
        return Floor(max(self.read, other.read), max(self.flops, other.flops))


@torch.inference_mode()
def measure_floor(dtype: torch.dtype, threads: int) -> Floor:
    """Measured with so many threads; the best of a few tries."""
    set_num_threads(threads)
    ones = 0x3F80_3F80_3F80_3F80  # four times 1 in bfloat16, twice about 1 in float32
    words = torch.from_numpy(np.full(READ_BYTES // 8, ones, np.int64))  # in huge pages, see huge_pages.py
    matrix, vector = words.view(dtype).view(-1, 4096), torch.ones(4096, dtype=dtype)
    a, b = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype) for _ in range(2))
    seconds = min(_best(words.sum), _best(lambda: matrix @ vector))
    return Floor(READ_BYTES / seconds, 2 * GEMM_SIZE**3 / _best(lambda: a @ b))


def _best(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def weight_bytes_of_a_step(model: Any, batch: int) -> float:
    """Bytes of weights that one decode step reads: all but the embedding, and of the experts those that `batch` tokens
    hit, when each picks evenly."""
    site = find_routers(model)[0].site
    hit = 1.0 - (1.0 - site.top_k / site.num_experts) ** batch
    embedding = model.get_input_embeddings().weight
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and model.get_output_embeddings().weight is not embedding:
            continue
        total += parameter.nbytes * (hit if ".experts." in name else 1.0)
    return total


class Attention(NamedTuple):
    """What attention costs: bytes of keys and values that one token leaves in all layers, and operations of one query
    token with one of the keys, in all layers and heads."""

    token_bytes: float
    pair_flops: float

    def prefill_flops(self, tokens: int) -> float:
        """Operations over a prompt, each token with those before it and itself."""
        return self.pair_flops * tokens * (tokens + 1) / 2


@torch.inference_mode()
def attention_of(model: Any) -> Attention:
    """Read off the cache that two tokens leave behind in transformers, as `[batch, heads, tokens, width]`.

    Raises:
        ValueError: for a cache that is not keys and values of every token.
    """
    cache = model(input_ids=torch.tensor([[2, 3]], device=model.device), use_cache=True).cache
    layers = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if len(layers) != model.config.get_text_config().num_hidden_layers or any(k.shape[2] != 2 for k, _ in layers):
        raise ValueError(f"{type(model).__name__} does not keep keys and values of every token; leave out --floor")
    heads = model.config.get_text_config().num_attention_heads
    return Attention(
        token_bytes=sum(k.nbytes + v.nbytes for k, v in layers) / 2,
        pair_flops=sum(2.0 * heads * (k.shape[3] + v.shape[3]) for k, v in layers),
    )


def prefill_flops(model: Any, lengths: list[int]) -> float:
    """Operations of the matrix products that prompts of these lengths take: two per weight and token, of the experts
    the chosen ones, the head for the last token of each; and attention, causal."""
    site = find_routers(model)[0].site
    active, head, attention = 0.0, model.get_output_embeddings().weight.numel(), attention_of(model)
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and id(parameter) not in tables:
            active += parameter.numel() * (site.top_k / site.num_experts if ".experts." in name else 1.0)
    return sum(2 * active * length + 2 * head + attention.prefill_flops(length) for length in lengths)


class CaseFloor(NamedTuple):
    """The machine, and what one model and batch need of it: bytes that a decode step reads, which are weights, and keys
    and values half-way through the completions; and operations of the prefill."""

    machine: Floor
    dtype: str
    threads: int
    step_bytes: float
    prefill_flops: float

    @property
    def step_ms(self) -> float:
        """Ms of a decode step at least."""
        return 1e3 * self.machine.seconds_to_read(self.step_bytes)

    @property
    def prefill_ms(self) -> float:
        """Ms of the prefill at least."""
        return 1e3 * self.prefill_flops / self.machine.flops


def case_floor(model: Any, batch: int, prompt_len: int, new_tokens: int, threads: int) -> CaseFloor:
    """Measured now, with so many threads."""
    size = weight_bytes_of_a_step(model, batch)
    size += batch * (prompt_len + new_tokens / 2) * attention_of(model).token_bytes
    flops = prefill_flops(model, [prompt_len] * batch)
    return CaseFloor(measure_floor(model.dtype, threads), str(model.dtype)[6:], threads, size, flops)
