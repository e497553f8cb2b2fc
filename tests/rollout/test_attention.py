"""Attention over the slot pool against one written out by hand in float64: scale, grouped heads, windows, chunks, sinks
and soft caps, whatever the chunks and whoever shares the kernel call."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollout.attention import LatentCacheError, slot_attention
from rollout.attention_plan import AttentionBatch, Span
from rollout.kv_pool import KVPool

HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 8, 21
RULES = {
    "plain": {},
    "scaled": {"scaling": 0.05},
    "window": {"sliding_window": 5},
    "soft cap": {"softcap": 0.7},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "window, sinks, soft cap": {"sliding_window": 3, "softcap": 0.9, "s_aux": torch.tensor([1.0, 0.0, -2.0, 3.0])},
    "chunks": {"chunk": 6},
}


def by_hand(q, k, v, scaling=None, sliding_window=None, softcap=None, s_aux=None, chunk=None) -> np.ndarray:
    """Token by token in float64: `[tokens, heads, dim]`."""
    q, k, v = (t.double().numpy() for t in (q, k, v))
    out = np.zeros_like(q)
    for at in range(len(q)):
        first = max(0, at - sliding_window + 1) if sliding_window else at // chunk * chunk if chunk else 0
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = k[first : at + 1, kv] @ q[at, head] * (DIM**-0.5 if scaling is None else scaling)
            if softcap:
                scores = np.tanh(scores / softcap) * softcap
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(float(s_aux[head])) if s_aux is not None else 0)
            out[at, head] = weights @ v[first : at + 1, kv] / total
    return out


def states(seed: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of one request, `[tokens, heads, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(LENGTH, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))


def module(rule) -> SimpleNamespace:
    kind = "chunked_attention" if "chunk" in rule else "full_attention"
    config = SimpleNamespace(layer_types=[kind], attention_chunk_size=rule.get("chunk"))
    return SimpleNamespace(layer_idx=0, config=config)


def run(rule, chunk: int, batch_invariant: bool = False) -> list[np.ndarray]:
    """Three requests, `chunk` tokens of each per step, evenly spaced in the pool."""
    pool, requests = KVPool(3 * 32), [states(seed) for seed in range(3)]
    found: list[list[torch.Tensor]] = [[], [], []]
    keywords = {name: value for name, value in rule.items() if name != "chunk"}
    for start in range(0, LENGTH, chunk):
        end = min(start + chunk, LENGTH)
        size = end - start
        spans = [Span(i * size, (i + 1) * size, 32 * i, end, 32) for i in range(3)]
        slots = torch.cat([torch.arange(32 * i + start, 32 * i + end) for i in range(3)])
        q, k, v = (torch.cat([r[part][start:end] for r in requests]).transpose(0, 1)[None] for part in range(3))
        batch = AttentionBatch.plan(pool, spans, slots, batch_invariant)
        pool.begin(batch, torch.arange(start, end).repeat(3))
        pool.update(k, v, 0)
        out, _ = slot_attention(module(rule), q, k, v, None, attention_batch=batch, **keywords)
        for i, span in enumerate(spans):
            found[i].append(out[0, span.start : span.end])
    return [torch.cat(parts).numpy() for parts in found]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, LENGTH])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_every_rule_is_the_one_written_out_by_hand(rule, chunk, batch_invariant) -> None:
    for i, out in enumerate(run(rule, chunk, batch_invariant)):
        np.testing.assert_allclose(out, by_hand(*states(i), **rule), atol=1e-5)


def test_evenly_spaced_decodes_share_one_call() -> None:
    pool = KVPool(3 * 32)
    spans = [Span(i, i + 1, 32 * i, 5 + i, 32) for i in range(3)]
    batch = AttentionBatch.plan(pool, spans, torch.tensor([4, 37, 70]), False)
    assert [(group.start, group.end, group.stride) for group in batch.groups] == [(0, 3, 32)]
    assert batch.spans == []


def test_only_tokens_with_equally_many_keys_share_a_call_that_keeps_bits() -> None:
    pool = KVPool(5 * 32)
    lengths = [(2, 6), (2, 6), (1, 6), (1, 7), (1, 7)]  # new tokens and keys of each request
    ends = np.cumsum([new for new, _ in lengths]).tolist()
    spans = [
        Span(end - new, end, 32 * i, keys, 32) for i, ((new, keys), end) in enumerate(zip(lengths, ends, strict=True))
    ]
    batch = AttentionBatch.plan(pool, spans, torch.arange(ends[-1]), True)
    assert [(group.start, group.end, group.tokens) for group in batch.groups] == [(0, 4, 2), (5, 7, 1)]
    assert batch.spans == [spans[2]]


def call(**keywords) -> None:
    pool = KVPool(4)
    batch = AttentionBatch.plan(pool, [Span(0, 2, 0, 2, 4)], torch.tensor([0, 1]), False)
    q, k, v = (t[:2].transpose(0, 1)[None] for t in states(0))
    pool.begin(batch, torch.arange(2))
    pool.update(k, v, 0)
    slot_attention(
        module({}), q, keywords.pop("key", k), v, keywords.pop("mask", None), attention_batch=batch, **keywords
    )


def test_an_unknown_keyword_is_refused_by_name_and_none_is_harmless() -> None:
    call(position_bias=None)
    with pytest.raises(ValueError, match=r"SimpleNamespace passes \['alibi_slopes'\] to attention"):
        call(alibi_slopes=torch.ones(4))
    with pytest.raises(ValueError, match=r"passes \['attention_mask'\] to attention"):
        call(mask=torch.zeros(1, 1, 2, 2))


def test_keys_of_another_shape_than_the_cached_ones_mean_a_latent_cache() -> None:
    with pytest.raises(LatentCacheError, match="expands what it caches"):
        call(key=torch.zeros(1, 8, 2, DIM))
