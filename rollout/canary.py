"""Does an engine survive loading its own weights again? Some do not, and say nothing.

vLLM 0.30 on a CPU reloads MoE weights into buffers that its kernel reads in another layout: the engine answers, reports
health, and computes neither the old model nor the new one. So the first update of every engine is a rehearsal.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from rollout.backend import SampleRequest
from rollout.engine_adapter import new_request_id
from rollout.engine_model import EngineModel
from rollout.engine_reply import EngineReply, trace_of
from rollout.sampling import SamplingParams

Generate: TypeAlias = Callable[[SampleRequest, str], Awaitable[EngineReply]]
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


async def scaled_by_temperature(generate: Generate, model: EngineModel) -> bool:
    """Whether logprobs are those behind the temperature: so cold that one token is left to draw, its logprob is 0.

    Of several prompts one is enough: in bfloat16 two tokens may be equally likely.
    """
    params = SamplingParams(temperature=1e-4, max_tokens=1, ignore_eos=True, seed=0)
    cold = [replace(request, sampling_params=params) for request in greedy_requests(model.vocab_size)]
    replies = [await generate(request, new_request_id()) for request in cold]
    return max(reply.logprobs[0] for reply in replies) > -1e-2


def greedy_requests(vocab_size: int) -> list[SampleRequest]:
    """Of prompts that nobody asked before: keys and values from a prefix cache were computed in other batches, which in
    bfloat16 is enough to change a route."""
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=0)
    prompts = np.random.default_rng().integers(0, vocab_size, (PROMPTS, PROMPT_TOKENS)).tolist()
    return [SampleRequest(f"canary/0/{i}/0", 0, tuple(prompt), params) for i, prompt in enumerate(prompts)]


async def sing(generate: Generate, model: EngineModel, requests: Sequence[SampleRequest]) -> list[Song]:
    """The checked answers, one after the other.

    Raises:
        ValueError: an answer cannot become a trace of this model.
        EngineError: the engine refused, or failed.
    """
    songs = []
    for request in requests:
        reply = await generate(request, new_request_id())
        trace_of(request, reply, model, 0)
        songs.append(Song(reply.output_ids, cast("np.ndarray", reply.layers)))
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
