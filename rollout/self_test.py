"""Checks at load: the engine's logits and routes are those of the plain model, or the model is refused.

An attention keyword that the slot pool does not honour, a cache type it cannot hold, a router that a kernel bypasses:
each would give wrong rows silently. A short prompt is computed whole, in chunks and token by token, and compared.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any, NamedTuple

import numpy as np
import torch

from rollout.attention import LatentCacheError, NativeAttentionError
from rollout.backend import SampleRequest
from rollout.capture import RoutedExpertsCapturer
from rollout.device import FEW_TOKENS
from rollout.experts import ROW_MULTIPLE
from rollout.layer_outputs import LayerOutputs, first_difference, record_layers
from rollout.model_runner import ModelRunner
from rollout.parallel import CollectiveError, RankGroup, StepShape
from rollout.request import Request
from rollout.sampling import SamplingParams
from rollout.scheduler import Work
from rollout.stops import StopChecker

logger = logging.getLogger(__name__)
PROMPT_LEN = 24
MAX_WINDOW = 64  # the prompt is made longer than windows up to here
OWN_CACHE_PROMPT_LEN = 96  # compressed and sparse caches show their differences late
MAX_ROWS_INVARIANT = 2048
MAX_ROWS = 2 * (MAX_WINDOW + 8) + ROW_MULTIPLE  # of one forward here: two prompts, and padding
# Mean |difference| of logits as a share of their spread. A wrong mask or scale is off by more than 0.1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.08, torch.float16: 0.04}
# Some state-space layers of transformers decode with another algorithm than they compute a prompt with (nemotron_h
# clamps its time steps in one of them only): up to here that is said in the log, and not held against the engine.
STATE_TOLERANCE = 1e-2


class Reference(NamedTuple):
    """A prompt `[T]`, the plain model's logits `[T, vocab]`, hidden states by layer and, with capture, its routes
    `[T, sites, K]`."""

    tokens: list[int]
    logits: torch.Tensor
    layers: LayerOutputs
    routes: np.ndarray | None


@torch.inference_mode()
def plain_forward(
    model: Any,
    capturer: RoutedExpertsCapturer | None,
    vocab_size: int,
    max_len: int,
    min_len: int = PROMPT_LEN,
    ranks: RankGroup | None = None,
) -> Reference:
    """One forward of the model as transformers runs it, on pseudo-random tokens, at least `min_len` if they fit.

    The ranks of a group call it together, on the same tokens, as they do all checks here: their experts are divided.
    The padding token is left out: its embedding is zero, and scores over zeros tie.
    """
    length = min(max(_prompt_len(model.config.get_text_config()), min_len), max_len)
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    tokens = [token for i in range(2 * length) if (token := (7919 * i + 13) % vocab_size) != pad][:length]
    if ranks is not None:
        ranks.begin(-1, StepShape((len(tokens),) * ranks.size))
    if capturer is not None:
        capturer.on_forward_begin()
    with record_layers(model) as layers:
        ids = torch.tensor([tokens]).to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0].float().cpu()
    routes = None
    if capturer is not None:
        routes = capturer.on_forward_end(torch.arange(len(tokens))).routed_experts.cpu().numpy()
    return Reference(tokens, logits, layers, routes)


def _prompt_len(config: Any) -> int:
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return max([PROMPT_LEN, *(window + 8 for window in windows if isinstance(window, int) and window <= MAX_WINDOW)])


def check_engine(runner: ModelRunner, reference: Reference) -> None:
    """Compare the engine's forward with `reference`.

    Raises:
        ValueError: naming the check that failed, by how much, and the first layer that differs.
    """
    length = len(reference.tokens)
    ways = {"whole": [length], "in chunks": _chunks(length, 7), "token by token": _chunks(length, 1)}
    if runner.whole_prompts:
        ways = {"whole": [length], "token by token": [length // 2, *_chunks(length - length // 2, 1)]}
    for name, chunks in ways.items():
        logits, routes = _supported_forward(runner, reference.tokens, chunks)
        error = float((logits - reference.logits).abs().mean() / reference.logits.std())
        limit = TOLERANCE[runner.model.dtype]
        if runner.whole_prompts and limit < error <= STATE_TOLERANCE:
            logger.warning(
                "%s computed %s differs by %.1e from one forward: its layers decode with another algorithm, also in "
                "transformers; a trainer's forward will not agree to the last digits",
                type(runner.model).__name__,
                name,
                error,
            )
        elif not error <= limit:
            raise ValueError(
                f"{type(runner.model).__name__} computed {name} {_where(runner)} differs from the plain model: "
                f"mean logit error {error:.2e} of their spread, first in {_first_layer(runner, reference, chunks)}. "
                "Its attention or cache is not supported exactly"
            )
        if reference.routes is not None and routes is not None:
            _check_routes(runner, name, routes, reference.routes)


def _first_layer(runner: ModelRunner, reference: Reference, chunks: list[int]) -> str:
    with record_layers(runner.model) as found:
        engine_forward(runner, reference.tokens, chunks)
    name = first_difference(found, reference.layers, TOLERANCE[runner.model.dtype])
    return "the head" if name is None else f"{name} ({type(runner.model.get_submodule(name)).__name__})"


def _where(runner: ModelRunner) -> str:
    return "on the slot pool" if runner.own_caches is None else "with its own cache"


def _chunks(length: int, size: int) -> list[int]:
    return [min(size, length - start) for start in range(0, length, size)]


def _supported_forward(
    runner: ModelRunner, tokens: list[int], chunks: list[int]
) -> tuple[torch.Tensor, np.ndarray | None]:
    try:
        return engine_forward(runner, tokens, chunks)
    except (LatentCacheError, NativeAttentionError, CollectiveError):  # the last: a neighbour is gone
        raise
    except Exception as error:  # whatever a model does with a cache or a keyword that the slot pool lacks
        raise ValueError(
            f"{type(runner.model).__name__} does not run {_where(runner)}: {type(error).__name__}: {error}"
        ) from error


def _check_routes(runner: ModelRunner, name: str, routes: np.ndarray, expected: np.ndarray) -> None:
    agree = float((np.sort(routes, -1) == np.sort(expected, -1)).all(-1).mean())
    if agree < (0.99 if runner.model.dtype is torch.float32 else 0.5):
        raise ValueError(
            f"{type(runner.model).__name__} computed {name}: only {agree:.1%} of the recorded routes "
            "are those of the plain model"
        )


def check_batch_invariance(runner: ModelRunner, reference: Reference, max_batch_tokens: int) -> None:
    """Require bit-equal logits whole, in chunks, beside another request, in a full batch, and of a token beside others.

    A full batch is what it takes for element-wise kernels to split their work between threads.

    Raises:
        ValueError: this device, dtype or model does not give them.
    """
    tokens = reference.tokens
    whole, _ = engine_forward(runner, tokens, [len(tokens)])
    for chunk in () if runner.whole_prompts else (7, 1):
        if not torch.equal(engine_forward(runner, tokens, _chunks(len(tokens), chunk))[0], whole):
            raise ValueError(_not_invariant(runner, f"in chunks of {chunk}"))
    full = min(max_batch_tokens, MAX_ROWS_INVARIANT) // len(tokens)
    for count, how in ((2, "beside another request"), (max(2, full), "in a full batch")):
        runner.resize(count * len(tokens))
        prompts = [tokens, *[tokens[::-1]] * (count - 1)]
        logits = _run(runner, _works(prompts, 0, len(tokens)))[0]
        if not torch.equal(logits[: len(tokens)], whole):
            raise ValueError(_not_invariant(runner, how))
        if not runner.whole_prompts:
            last = _run(runner, _works(prompts, len(tokens) - 1, 1))[0][:1]
            if not torch.equal(last, whole[-1:]):
                raise ValueError(_not_invariant(runner, f"of a token {how}"))


def _not_invariant(runner: ModelRunner, how: str) -> str:
    return (
        f"batch_invariant=True is not available for {type(runner.model).__name__} in {runner.model.dtype} "
        f"on this machine: logits {how} differ in their last bits; use batch_invariant=False or dtype='float32'"
    )


def engine_forward(runner: ModelRunner, tokens: list[int], chunks: list[int]) -> tuple[torch.Tensor, np.ndarray | None]:
    """Logits float32 `[T, vocab]` and routes `[T, sites, K]` of one prompt computed in chunks of these lengths."""
    starts = np.cumsum([0, *chunks[:-1]]).tolist()
    parts = [_run(runner, _works([tokens], start, length)) for start, length in zip(starts, chunks, strict=True)]
    routes = [part[1] for part in parts if part[1] is not None]
    return torch.cat([part[0] for part in parts]), np.concatenate(routes) if routes else None


def time_decode(runner: ModelRunner, requests: int) -> float:
    """Seconds of a decode step of so many requests, the later ones of a short prompt; of a prompt where a model's state
    cannot be continued. Changes the size of the pool."""
    vocab = len(runner.model.get_input_embeddings().weight)
    start = 0 if runner.whole_prompts else PROMPT_LEN - 1
    requests = max(1, min(requests, FEW_TOKENS // (PROMPT_LEN - start)))
    runner.resize(requests * PROMPT_LEN)
    firsts = range(13, 13 + requests * PROMPT_LEN, PROMPT_LEN)  # equal prompts would all hit the same few experts
    prompts = [[7919 * (first + i) % vocab for i in range(PROMPT_LEN)] for first in firsts]
    works = _works(prompts, start, PROMPT_LEN - start)
    begun = time.perf_counter()
    _run(runner, works)
    return time.perf_counter() - begun


def _works(prompts: list[list[int]], start: int, length: int) -> list[Work]:
    works = []
    for index, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=0, seed=0)
        request = SampleRequest("self-test/0/0/0", 0, tuple(prompt), params)
        entry = Request(request, StopChecker(params, (), None), 0, None)
        entry.row, entry.slot, entry.capacity = index, index * len(prompt), len(prompt)
        works.append(Work(entry, start, length, samples=False))
    return works


def _run(runner: ModelRunner, works: list[Work]) -> tuple[torch.Tensor, np.ndarray | None]:
    prepared = runner.prepare(works)
    rows = len(prepared.slots)
    wanted = list(range(rows + prepared.num_padding))
    prepared = dataclasses.replace(prepared, logits_rows=torch.tensor(wanted), wanted_rows=wanted)

    def work() -> tuple[torch.Tensor, np.ndarray | None]:
        batch = prepared.to_device(runner.stream)
        if (ranks := runner.ranks) is not None:
            ranks.begin(-1, StepShape((rows,) * ranks.size, padded=(rows + prepared.num_padding,) * ranks.size))
        if runner.capturer is None:
            return runner.logits(batch)[:rows].float().cpu(), None
        runner.capturer.on_forward_begin()
        logits = runner.logits(batch)[:rows].float().cpu()
        output = runner.capturer.on_forward_end(batch.slots, forwards=runner.forward_rows(batch))
        return logits, output.routed_experts.cpu().numpy()

    return runner.stream.call(work)
