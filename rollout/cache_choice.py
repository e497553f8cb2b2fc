"""Where a model's keys and values live, and which kernels read them: tried at load, each with the self-test."""

from __future__ import annotations

import logging

from rollout.attention import LatentCacheError, NativeAttentionError
from rollout.loader import LoadedModel, rope_types
from rollout.model_runner import ModelRunner
from rollout.own_cache import OwnCacheForward
from rollout.self_test import OWN_CACHE_PROMPT_LEN, Reference, check_engine, plain_forward

logger = logging.getLogger(__name__)


class WrongKernelsError(ValueError):
    """Our own kernels compute something else on this machine, and an engine that must compute like others has them."""


def choose_cache(runner: ModelRunner, reference: Reference, plain_attention: str, loaded: LoadedModel) -> None:
    """Keys and values in the pool, else the latents of a model that expands them, else the model's own cache.

    Each is tested; the last is slow, which is said once.
    """
    try:
        try:
            _check_one_rope(runner)
            _check_kernels(runner, reference)
        except LatentCacheError:
            runner.pool.reset(latent=True)
            _check_kernels(runner, reference)
    except WrongKernelsError:
        raise
    except ValueError as error:
        if runner.ranks is not None:
            raise ValueError(f"{error}. The ranks of a group cannot run it on its own cache: use dp_size=1") from error
        runner.model.set_attn_implementation(plain_attention)
        runner.pool.reset(latent=False)
        if runner.states is not None:
            runner.states.close()
            runner.states = None
        runner.own_caches = OwnCacheForward(runner.model)
        longer = runner.stream.call(lambda: _longer_reference(runner, loaded))
        try:
            _check_kernels(runner, longer)
        except ValueError as second:
            raise ValueError(f"{second}. On the slot pool: {error}") from second
        logger.warning("%s. It runs on its own cache instead: exact, but one forward per request and step", error)


def _longer_reference(runner: ModelRunner, loaded: LoadedModel) -> Reference:
    with runner.fast_layers.undone():
        return plain_forward(
            runner.model, runner.capturer, loaded.vocab_size, loaded.max_positions, OWN_CACHE_PROMPT_LEN
        )


def _check_kernels(runner: ModelRunner, reference: Reference) -> None:
    """With our own kernels; where that fails with torch's attention, then with torch's kernels only, but where engines
    must compute alike."""
    failed = _failure(runner, reference)
    if failed is None:
        return
    layers, name = runner.fast_layers, type(runner.model).__name__
    if runner.native is not None:
        runner.native = None
        if _failure(runner, reference) is None:
            level = logging.INFO if isinstance(failed, NativeAttentionError) else logging.WARNING
            logger.log(level, "%s attends with torch's kernels: %s", name, failed)
            return
    native = layers.native
    if native is None or runner.ranks is not None:
        raise failed
    runner.stream.run(lambda: layers.use_kernels(None))
    if _failure(runner, reference) is not None:
        runner.stream.run(lambda: layers.use_kernels(native))
        raise failed
    if runner.batch_invariant:
        raise WrongKernelsError(f"{failed}. With native_kernels=False, in all engines, it does not") from failed
    logger.warning("%s computes with torch's kernels, ours are wrong here: %s", name, failed)


def _failure(runner: ModelRunner, reference: Reference) -> ValueError | None:
    """What the self-test says, if it fails; that the cache must be another one is raised."""
    try:
        check_engine(runner, reference)
    except LatentCacheError:
        raise
    except ValueError as error:
        return error
    return None


def _check_one_rope(runner: ModelRunner) -> None:
    """`longrope` chooses its frequencies by the longest position of a forward, here a batch of strangers."""
    if "longrope" in rope_types(runner.model):
        raise ValueError(f"{type(runner.model).__name__} uses rope_type 'longrope', which looks at the whole batch")
