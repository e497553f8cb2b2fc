"""Put an engine together: load, switch attention and experts, size the pool, test it, hand it over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rollout.attention import use_slot_attention
from rollout.auto_threads import Threads, candidates, choose_threads
from rollout.backend import ModelInfo
from rollout.cache_choice import choose_cache
from rollout.capture import RoutedExpertsCapturer
from rollout.checkpoint_names import CheckpointNames
from rollout.config import EngineOptions
from rollout.cuda_graphs import Buckets, GraphRunner, batch_sizes
from rollout.device import CpuStream, Stream, open_stream
from rollout.device_memory import ParkedWeights
from rollout.engine import Engine
from rollout.expert_parallel import use_expert_parallel
from rollout.experts import COMPACT, INVARIANT, MIN_ROWS, ROW_MULTIPLE
from rollout.fast_layers import FastLayers
from rollout.forced_rows import try_forcing
from rollout.group_start import NOT_FORCED, check_member, join, refuse_states
from rollout.group_weights import part_of
from rollout.huge_pages import use_huge_pages
from rollout.loader import LoadedModel, fingerprint, load_model, move_model
from rollout.lockstep import Lockstep, Membership
from rollout.model_runner import ModelRunner
from rollout.native import NativeKernels, choose_native
from rollout.native_build import loading_beside
from rollout.native_layers import use_native_products
from rollout.packed_experts import forget_packed, repack
from rollout.parallel import ExpertRange, RankGroup, StepShape
from rollout.prefix_cache import PrefixCache
from rollout.request import Request
from rollout.router import WATCHED_TOKENS
from rollout.scheduler import Scheduler
from rollout.self_test import (
    MAX_ROWS,
    Reference,
    check_batch_invariance,
    check_engine,
    plain_forward,
)
from rollout.sharded_loader import own_experts
from rollout.state_layers import StateLayers, find_state_modules
from rollout.update_modes import check_version
from rollout.weights import StagedWeights, stage

logger = logging.getLogger(__name__)
MAX_POOL_BYTES = 2 * 2**30


@dataclass
class BuiltEngine:
    """An engine that passed its self-test, and what belongs to it."""

    engine: Engine
    runner: ModelRunner
    info: ModelInfo
    tokenizer: Any
    stream: Stream
    names: CheckpointNames
    kv_tokens: int
    lockstep: Lockstep | None = None
    experts: ExpertRange | None = None
    parked: ParkedWeights | None = None

    def stage_weights(
        self, source: Any, version: int, force: bool, check_finite: bool, saved: bool | None = None
    ) -> StagedWeights:
        """Check version and weights while the old ones serve; for any thread. See LocalBackend.update_weights.

        A rank takes its part of the whole model's weights.
        """
        with contextlib.ExitStack() as stack:
            if hasattr(source, "close"):
                stack.callback(source.close)  # whoever feeds it must not wait for ever for a refused update
            check_version(version, self.engine.weight_version, force)
            if self.experts is not None:
                source = part_of(source, self.experts)
            return stage(self.names, source, check_finite, saved)

    def apply_weights(self, staged: StagedWeights, version: int, recompute: bool = False) -> None:
        """Copy staged weights behind the steps in flight; steps from now on use them.

        With `recompute` running requests give up their keys and values, and compute them again with the new weights
        under replay of the rows they have.
        """
        self.stream.run(lambda: self._replace_weights(staged))
        self.engine.weight_version = version
        if recompute:
            self.engine.yield_all()

    def _replace_weights(self, staged: StagedWeights) -> None:
        staged.copy_into(self.runner.model)
        repack(self.runner.model)

    def check_recompute(self) -> None:
        """Raises ValueError for a model that cannot repeat its routes while it recomputes."""
        if self.runner.forcing is None and self.runner.capturer is not None:
            raise ValueError(
                f"kv='recompute' replays recorded routes, and those of {type(self.runner.model).__name__} cannot be "
                "forced; use kv='keep'"
            )

    def sleep(self, level: int) -> None:
        """Free the pool and the weights on the device; level 1 keeps a copy of the weights on the host."""

        def park() -> None:
            self.runner.forget_all()
            forget_packed(self.runner.model)
            self.parked = ParkedWeights(self.runner.model, keep=level == 1)

        self.engine.forget_prefixes()
        self.stream.run(park)
        self.runner.resize(0)

    def wake(self, staged: StagedWeights | None, version: int) -> None:
        """Undo `sleep`, with staged weights if there are any."""
        assert self.parked is not None
        self.stream.run(self.parked.restore)
        if staged is None:
            self.stream.run(lambda: repack(self.runner.model))
        self.parked = None
        self.runner.resize(self.kv_tokens)
        if staged is not None:
            self.apply_weights(staged, version)

    def close(self) -> None:
        """Process what is in flight, stop the device thread, remove the hooks."""
        try:
            self.engine.drain()
        finally:
            self.stream.close()
            self.runner.fast_layers.undo()
            if self.runner.capturer is not None:
                self.runner.capturer.close()
            if self.lockstep is not None:
                self.lockstep.leave()


def build_engine(
    path: str, options: EngineOptions, on_finish: Callable[[Request], None], member: Membership | None = None
) -> BuiltEngine:
    """Load `path` and return a tested engine. Nothing keeps running when it fails.

    As a `member` of a group it waits for the others, who must be started alike, and holds its part of the experts.
    """
    stream = open_stream(options.device, 1 if options.num_threads == "auto" else options.num_threads)
    lockstep = None
    try:
        if member is not None:
            check_member(path, options, member)
            lockstep = join(path, options, member)
        return build_on(stream, path, options, on_finish, lockstep)
    except BaseException:
        stream.close()
        if lockstep is not None:
            lockstep.leave()
        raise


def build_on(
    stream: Stream,
    path: str,
    options: EngineOptions,
    on_finish: Callable[[Request], None],
    lockstep: Lockstep | None = None,
) -> BuiltEngine:
    """The same on a stream and in a group that the caller opened, and closes when this fails."""
    _check_device(options, stream.device)
    ranks = lockstep.ranks if lockstep is not None else None
    part = (ranks.rank, ranks.size) if ranks is not None else None
    with loading_beside(options.native_kernels, stream.device.type):
        loaded = load_model(path, options.dtype, options.trust_remote_code, part)
    threads = 1 if options.num_threads == "auto" else options.num_threads
    alike = "batch_invariant=True" if options.batch_invariant else "dp_size" if ranks is not None else ""
    native = choose_native(options.native_kernels, stream.device, threads, alike)
    stream.run(lambda: move_model(loaded.model, stream.device))
    forcing, not_forced = None, NOT_FORCED
    if ranks is not None:
        refuse_states(loaded.model)
        use_expert_parallel(loaded.model, ranks, INVARIANT if options.batch_invariant else COMPACT)
        if not options.batch_invariant:
            use_native_products(loaded.model, native)
        ranks.begin(-1, StepShape((WATCHED_TOKENS,) * ranks.size))
    if ranks is None or ranks.layout != "allgather":
        forcing, not_forced = stream.call(lambda: try_forcing(loaded.model))
    capturer = None
    if options.enable_return_routed_experts:
        rows = max(options.max_batch_tokens + ROW_MULTIPLE, MAX_ROWS, options.max_running_requests)
        capturer = stream.call(lambda: RoutedExpertsCapturer(loaded.model, loaded.spec, rows, ranks))
    runner = _tested_runner(loaded, options, capturer, stream, ranks, native)
    kv_tokens = options.kv_tokens or _default_kv_tokens(loaded, options, runner.pool.token_bytes)
    runner.resize(kv_tokens)
    if capturer is not None and runner.whole_prompts:
        longest = options.max_batch_tokens + min(loaded.max_positions, kv_tokens) + ROW_MULTIPLE
        stream.run(lambda: capturer.reserve(longest))
    runner.forcing = forcing
    if options.prefix_cache and runner.whole_prompts:
        raise ValueError(
            f"prefix_cache=True is not available for {type(loaded.model).__name__}: its layers carry a state that "
            "begins with the prompt; leave prefix_cache out"
        )
    scheduler = Scheduler(
        options.max_running_requests,
        options.max_batch_tokens,
        kv_tokens,
        whole_prompts=runner.whole_prompts,
        preempts=forcing is not None or capturer is None,
        store=runner,
        cache=PrefixCache() if options.prefix_cache else None,
        max_step_tokens=None if capturer is None else capturer.max_rows - ROW_MULTIPLE,
    )
    engine = Engine(
        runner,
        scheduler,
        loaded.spec,
        loaded.eos_token_ids,
        loaded.tokenizer,
        overlap=not options.disable_overlap_schedule,
        on_finish=on_finish,
        lockstep=lockstep,
    )
    names = CheckpointNames(loaded.model)
    info = _info(path, loaded, kv_tokens, options, not_forced)
    return BuiltEngine(
        engine, runner, info, loaded.tokenizer, stream, names, kv_tokens, lockstep, own_experts(loaded.model)
    )


def _tested_runner(
    loaded: LoadedModel,
    options: EngineOptions,
    capturer: RoutedExpertsCapturer | None,
    stream: Stream,
    ranks: RankGroup | None,
    native: NativeKernels | None,
) -> ModelRunner:
    """Switch the model to our attention and experts, over a pool just large enough for the self-test, and test it."""
    model = loaded.model
    if ranks is None:
        model.set_experts_implementation("eager")
    tokens = loaded.vocab_size, loaded.max_positions
    reference = stream.call(lambda: plain_forward(model, capturer, *tokens, ranks=ranks))
    plain_attention = model.config._attn_implementation
    use_slot_attention(model)
    stream.run(lambda: use_huge_pages(model))
    experts = _experts(options, stream.device) if ranks is None else None
    layers = FastLayers(model, experts, options.pack_weights, native)
    stream.run(layers.use)
    size = 2 * len(reference.tokens)
    limits = options.max_running_requests, options.batch_invariant
    runner = ModelRunner(model, stream, capturer, size, *limits, ranks, layers)
    if find_state_modules(model):
        runner.states = StateLayers(model)
    choose_cache(runner, reference, plain_attention, loaded)
    _use_graphs(runner, reference, options)
    if options.num_threads != 1 and isinstance(stream, CpuStream) and ranks is None:
        _set_threads(runner, options)
        runner.resize(size)
        runner.forget_all()
    if options.batch_invariant and runner.own_caches is None:
        check_batch_invariance(runner, reference, options.max_batch_tokens)
    runner.forget_all()
    if capturer is not None:
        capturer.seconds = 0.0  # the self-test's
    return runner


def _set_threads(runner: ModelRunner, options: EngineOptions) -> None:
    """In batch-invariant mode nothing that could change bits is left to a measurement but the number that is "auto"."""
    most = 2 if options.batch_invariant else None
    counts = candidates(most) if options.num_threads == "auto" else [options.num_threads]
    ways = [Threads(count, few) for count in counts for few in ((1,) if options.batch_invariant else (1, count))]
    choose_threads(runner, options.max_running_requests, ways)


def _use_graphs(runner: ModelRunner, reference: Reference, options: EngineOptions) -> None:
    """Record decode steps on an accelerator, and test the engine again with graphs.

    Raises:
        ValueError: the model's decode cannot be recorded.
    """
    if options.disable_cuda_graph or isinstance(runner.stream, CpuStream) or runner.ranks is not None:
        return
    if runner.whole_prompts:
        logger.info("%s keeps a state of its own: its decode steps run without graphs", type(runner.model).__name__)
        return
    runner.buckets = Buckets(batch_sizes(options.cuda_graph_batch_sizes, options.max_running_requests))
    runner.graphs = GraphRunner(runner.stream.api, runner.stream.compute, runner.capturer)
    try:
        check_engine(runner, reference)
    except ValueError as error:
        raise ValueError(f"{error}. This is with CUDA graphs; use disable_cuda_graph=True") from error


def _experts(options: EngineOptions, device: torch.device) -> str:
    if options.batch_invariant:
        return "batch_invariant_experts"
    if options.experts_implementation == "auto":
        return "hit_experts" if device.type == "cpu" else "grouped_mm"
    return options.experts_implementation


def _check_device(options: EngineOptions, device: torch.device) -> None:
    """Combinations that would wait for the device in every layer, or were never shown to be exact there."""
    if device.type == "cpu":
        return
    if options.batch_invariant:
        raise ValueError(f"batch_invariant=True is not available on device {str(device)!r}; use device='cpu'")
    if options.experts_implementation in ("hit_experts", "eager"):
        raise ValueError(
            f"experts_implementation={options.experts_implementation!r} waits in every layer of device "
            f"{str(device)!r} to learn which experts were hit; use 'auto' or 'grouped_mm'"
        )


def _info(path: str, loaded: LoadedModel, kv_tokens: int, options: EngineOptions, not_forced: str) -> ModelInfo:
    limit, reason = min((loaded.max_positions, "the model's positions"), (kv_tokens, "kv_tokens, the key/value pool"))
    return ModelInfo(
        spec=loaded.spec,
        vocab_size=loaded.vocab_size,
        max_sequence_tokens=limit,
        max_sequence_reason=reason,
        tokenizer_path=path if loaded.tokenizer is not None else None,
        captures_routes=options.enable_return_routed_experts,
        not_forced=not_forced,
        fingerprint=fingerprint(loaded.model, loaded.tokenizer),
        trust_remote_code=options.trust_remote_code,
    )


def _default_kv_tokens(loaded: LoadedModel, options: EngineOptions, token_bytes: int) -> int:
    """As many tokens as `max_running_requests` full sequences need, at most 2 GiB, at least one full sequence.

    The model's own caches grow by themselves: there only the first bound counts.
    """
    wanted = options.max_running_requests * loaded.max_positions
    fitting = MAX_POOL_BYTES // token_bytes if token_bytes else wanted
    return max(min(wanted, fitting), min(loaded.max_positions, 32768), 2 * MIN_ROWS)
