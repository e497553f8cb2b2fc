"""Does an engine survive loading its own weights again? Some do not, and say nothing.

vLLM 0.30 on a CPU reloads MoE weights into buffers that its kernel reads in another layout: the engine answers, reports
health, and computes neither the old model nor the new one. So the first update of every engine is a rehearsal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import numpy as np

from rollout.backend import SampleRequest
from rollout.engine_reply import EngineReply
from rollout.sampling import SamplingParams

PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 3, 16, 8


class Song(NamedTuple):
    """One greedy answer: `ids` of the completion, `layers [rows, layers, K]`."""

    ids: list[int]
    layers: np.ndarray


def one_choice(vocab_size: int) -> SampleRequest:
    """A token drawn from the likeliest one alone: its logprob is 0 in the distribution that it was sampled from."""
    prompt = np.random.default_rng(PROMPTS).integers(0, vocab_size, PROMPT_TOKENS)
    params = SamplingParams(temperature=1.0, top_k=1, max_tokens=1, ignore_eos=True, seed=0)
    return SampleRequest("canary/0/sure/0", 0, tuple(map(int, prompt)), params)


async def sing(
    generate: Callable[[SampleRequest, str], Awaitable[EngineReply]], vocab_size: int, names: Callable[[], str]
) -> list[Song]:
    """Greedy answers to fixed prompts. `names` gives each request its id."""
    songs = []
    for index in range(PROMPTS):
        prompt = np.random.default_rng(index).integers(0, vocab_size, PROMPT_TOKENS)
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=0)
        request = SampleRequest(f"canary/0/{index}/0", 0, tuple(map(int, prompt)), params)
        reply = await generate(request, names())
        if reply.layers is None:
            raise ValueError("the canary's answer holds no routes")
        songs.append(Song(reply.output_ids, reply.layers))
    return songs


def difference(before: list[Song], after: list[Song]) -> str | None:
    """What the reload of the same weights changed, None when nothing.

    >>> song = Song([7, 9], np.zeros((3, 1, 1), np.uint8))
    >>> difference([song], [song]), difference([song], [song._replace(ids=[7, 8])])
    (None, 'greedy tokens of canary 0 were [7, 9] and are [7, 8]')
    """
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        if old.ids != new.ids:
            return f"greedy tokens of canary {index} were {old.ids} and are {new.ids}"
        if not np.array_equal(old.layers, new.layers):
            share = (old.layers != new.layers).any(-1).mean()
            return f"{share:.1%} of the routes of canary {index} changed"
    return None
