"""Where a model's keys and values live, and which kernels read them: tried at load, each with the self-test."""

from __future__ import annotations

import logging

from rollout.attention import LatentCacheError, NativeAttentionError
from rollout.loader import LoadedModel, rope_types
from rollout.model_runner import ModelRunner
from rollout.own_cache import OwnCacheForward
from rollout.self_test import OWN_CACHE_PROMPT_LEN, Reference, check_engine, plain_forward

logger = logging.getLogger(__name__)


def choose_cache(runner: ModelRunner, reference: Reference, plain_attention: str, loaded: LoadedModel) -> None:
    """Keys and values in the pool, else the latents of a model that expands them, else the model's own cache.

    Each is tested; the last is slow, which is said once.
    """
    try:
        try:
            _check_one_rope(runner)
            _check_attention(runner, reference)
        except LatentCacheError:
            runner.pool.reset(latent=True)
            check_engine(runner, reference)
    except ValueError as error:
        if runner.ranks is not None:
            raise ValueError(f"{error}. The ranks of a group cannot run it on its own cache: use dp_size=1") from error
        runner.model.set_attn_implementation(plain_attention)
        runner.pool.reset(latent=False)
        if runner.states is not None:
            runner.states.close()
            runner.states = None
        runner.own_caches = OwnCacheForward(runner.model)
        limits = loaded.vocab_size, loaded.max_positions, OWN_CACHE_PROMPT_LEN
        longer = runner.stream.call(lambda: plain_forward(runner.model, runner.capturer, *limits))
        try:
            check_engine(runner, longer)
        except ValueError as second:
            raise ValueError(f"{second}. On the slot pool: {error}") from second
        logger.warning("%s. It runs on its own cache instead: exact, but one forward per request and step", error)


def _check_attention(runner: ModelRunner, reference: Reference) -> None:
    """With our own kernels where they compute this model's attention, else with torch's."""
    try:
        check_engine(runner, reference)
    except LatentCacheError:
        raise
    except ValueError as error:
        if runner.native is None:
            raise
        runner.native = None
        check_engine(runner, reference)
        level = logging.INFO if isinstance(error, NativeAttentionError) else logging.WARNING
        logger.log(level, "%s attends with torch's kernels: %s", type(runner.model).__name__, error)


def _check_one_rope(runner: ModelRunner) -> None:
    """`longrope` chooses its frequencies by the longest position of a forward, here a batch of strangers."""
    if "longrope" in rope_types(runner.model):
        raise ValueError(f"{type(runner.model).__name__} uses rope_type 'longrope', which looks at the whole batch")
