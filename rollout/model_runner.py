"""One step on the device: forward, capture, sampling. Everything a step needs is noted at launch as host integers."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
import torch

from rollout.attention_plan import AttentionBatch, Span
from rollout.capture import RoutedExpertsCapturer
from rollout.cuda_graphs import Bucket, Buckets, GraphRunner, Tensors
from rollout.decode_steps import DecodeStep
from rollout.device import CpuStream, Stream
from rollout.engine_stats import StepSeconds
from rollout.experts import MIN_ROWS, ROW_MULTIPLE
from rollout.fast_layers import FastLayers
from rollout.forced_rows import ForcedRows, RowForcing
from rollout.forward_batch import ForwardBatch, GenerationBatchResult, route_segments
from rollout.kv_pool import KVPool
from rollout.logprobs import TopRows, plan_prompts
from rollout.own_cache import OwnCacheForward, cache_keyword
from rollout.parallel import RankGroup, StepShape
from rollout.penalties import TokenCounts
from rollout.processors import LogitEdits
from rollout.rng import uniforms
from rollout.sampler import Drawn, SamplingBatch, sample
from rollout.scheduler import Work, flatten
from rollout.state_layers import StateLayers


class ModelRunner:
    """Runs the unmodified transformers model over the slot pool."""

    def __init__(
        self,
        model: Any,
        stream: Stream,
        capturer: RoutedExpertsCapturer | None,
        kv_tokens: int,
        max_running_requests: int,
        batch_invariant: bool,
        ranks: RankGroup | None = None,
        fast_layers: FastLayers | None = None,
    ) -> None:
        self.model = model
        self.ranks = ranks
        self.fast_layers = fast_layers or FastLayers(model, None, pack=False, native=None)
        self.native = self.fast_layers.native
        self.stream = stream
        self.capturer = capturer
        self.pool = KVPool(kv_tokens)
        self.states: StateLayers | None = None
        self.own_caches: OwnCacheForward | None = None
        self.forcing: RowForcing | None = None
        self.buckets: Buckets | None = None
        self.graphs: GraphRunner | None = None
        self.seconds = StepSeconds()
        self._cache_keyword = cache_keyword(model)
        self.batch_invariant = batch_invariant
        self._decodes: DecodeStep | None = None
        self._counts = TokenCounts(max_running_requests)
        self._last_token = stream.call(
            lambda: torch.zeros(max_running_requests, dtype=torch.int64, device=stream.device)
        )

    @property
    def whole_prompts(self) -> bool:
        """A state cannot be continued in the middle of a prompt: transformers' layers take all of it, or one token."""
        return self.states is not None or self.own_caches is not None

    def launch(self, step: int, batch: list[Work], shape: StepShape | None = None) -> GenerationBatchResult:
        """Queue one step and return at once. A rank of a group passes the `shape` that the ranks agreed on."""
        begun = time.perf_counter()
        forward = self.prepare(batch, None if shape is None or self.ranks is None else shape.rows[self.ranks.rank])
        self.seconds.prepare += time.perf_counter() - begun
        result = GenerationBatchResult(step, batch)

        def work() -> None:
            if self.ranks is not None and shape is not None:
                self.ranks.begin(step, shape)
            self._forward(forward.to_device(self.stream), result)
            result.copy_to_cpu(self.stream)

        self.stream.launch(work, result.copy_done)
        return result

    def move_slots(self, source: int, target: int, count: int) -> None:
        """Move a request's keys and values, its state or its own cache, behind all steps in flight."""
        self.stream.launch(lambda: self._move(source, target, count))

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copy keys and values, behind all steps in flight."""
        self.stream.launch(lambda: self.pool.copy(source, target, count))

    def clear_slots(self, slot: int, count: int) -> None:
        """Zero the keys and values of an ended request, behind all steps in flight: no NaN waits for the next owner.

        Its state or its own cache goes too.
        """
        self.stream.launch(lambda: self._clear(slot, count))

    def resize(self, kv_tokens: int) -> None:
        """Change the number of slots; what they held is forgotten."""
        if self.graphs is not None:
            self.graphs.clear()
        self.stream.run(lambda: self.pool.resize(kv_tokens))

    def forget_all(self) -> None:
        """Drop the states and caches that the self-test left."""
        for keeper in (self.states, self.own_caches):
            if keeper is not None:
                keeper.clear()

    def _clear(self, slot: int, count: int) -> None:
        for keeper in (self.states, self.own_caches):
            if keeper is not None:
                keeper.forget(slot)
        if self.own_caches is None:
            self.pool.clear(slot, count)

    def _move(self, source: int, target: int, count: int) -> None:
        for keeper in (self.states, self.own_caches):
            if keeper is not None:
                keeper.move(source, target)
        if self.own_caches is None:
            self.pool.move(source, target, count)

    def rows_for(self, tokens: int) -> int:
        """Rows of a forward over so many tokens, with padding; at least one."""
        padded = self.batch_invariant and self.own_caches is None
        rows = max(tokens, 1)
        return rows + (-rows % ROW_MULTIPLE if padded else 0)

    def prepare(self, batch: list[Work], rows: int | None = None) -> ForwardBatch:
        """Note everything the step needs; runs on the host. `rows` as the ranks of a group agreed, `rows_for` alone."""
        following = None if self._decodes is None else self._decodes.next(batch, rows)
        if following is not None:
            forward, self._decodes = following
        else:
            forward = self._plan(batch, rows)
            self._decodes = DecodeStep.of(batch, forward)
        return forward

    def _plan(self, batch: list[Work], rows: int | None) -> ForwardBatch:
        position, slot = flatten(batch)
        ends = np.cumsum([w.length for w in batch])
        spans = [
            Span(int(end) - w.length, int(end), w.request.slot, w.start + w.length, w.request.capacity)
            for w, end in zip(batch, ends, strict=True)
        ]
        sampling = [(w, int(end) - 1) for w, end in zip(batch, ends, strict=True) if w.samples]
        asking = [(i, w) for i, (w, _) in enumerate(sampling) if w.request.asks_more]
        starts = [int(end) - w.length for w, end in zip(batch, ends, strict=True)]
        prompt_rows, prompts = plan_prompts(zip(starts, batch, strict=True), first=len(sampling))
        logits_rows = [row for _, row in sampling] + prompt_rows or [0]
        forced = [(w.request, w.start, w.start + w.length) for w in batch]
        bucket = self._bucket(batch, spans, bool(prompts or ForcedRows.needed(forced)))
        padded = self.batch_invariant and self.own_caches is None
        num_padding = (self.rows_for(len(position)) if rows is None else rows) - len(position)
        if bucket is not None:
            num_padding, logits_rows = bucket.rows - len(position), list(range(bucket.rows))
        if padded and len(logits_rows) < MIN_ROWS:
            logits_rows += [logits_rows[-1]] * (MIN_ROWS - len(logits_rows))
        return ForwardBatch(
            input_ids=torch.from_numpy(_pad(_host_tokens(batch, len(position)), num_padding)),
            position_ids=torch.from_numpy(_pad(position, num_padding)),
            decode_rows=torch.tensor([w.request.row for w in batch if w.is_decode], dtype=torch.int64),
            spans=spans,
            slots=torch.from_numpy(slot),
            attention=self._attention(spans, torch.from_numpy(slot), bucket),
            logits_rows=torch.tensor(logits_rows),
            wanted_rows=logits_rows,
            num_padding=num_padding,
            sample_rows=torch.tensor([w.request.row for w, _ in sampling], dtype=torch.int64),
            sampling=_sampling_batch([w for w, _ in sampling]) if sampling else None,
            edits=LogitEdits.plan([(i, w.request, w.drawn) for i, w in asking], self._counts),
            top=TopRows.plan([(i, w.request.wanted, w.drawn) for i, w in asking]),
            prompts=prompts,
            segments=route_segments(batch, spans),
            forced=ForcedRows.plan(forced, len(position) + num_padding),
            bucket=bucket,
        )

    def _bucket(self, batch: list[Work], spans: list[Span], extras: bool) -> Bucket | None:
        """Where the step's forward can be of a static shape: no prompt logprobs, nothing computed under replay."""
        if self.buckets is None or extras or self.whole_prompts or len({work.samples for work in batch}) > 1:
            return None
        return self.buckets.choose(spans)

    def _attention(self, spans: list[Span], slots: torch.Tensor, bucket: Bucket | None) -> AttentionBatch:
        if bucket is not None:
            return AttentionBatch.plan_table(self.pool, spans, slots, *bucket)
        return AttentionBatch.plan(self.pool, spans, slots, self.batch_invariant, self.native)

    def _forward(self, batch: ForwardBatch, result: GenerationBatchResult) -> None:
        batch.input_ids[: len(batch.decode_rows)] = self._last_token[batch.decode_rows]
        if self.capturer is not None:
            self.capturer.on_forward_begin()
        begun = time.perf_counter()
        with self._forcing(batch):
            logits = self.logits(batch)
        self.seconds.model += time.perf_counter() - begun
        if self.capturer is not None:
            result.routed_experts_output = self.capturer.on_forward_end(
                batch.slots, batch.segments, forwards=self.forward_rows(batch), step=result.step
            )
        begun = time.perf_counter()
        if batch.sampling is not None:
            drawn = self._sample(logits, batch, batch.sampling)
            result.next_tokens, result.logprobs, result.raw_logprobs = drawn[:3]
            self._last_token[batch.sample_rows] = drawn.next_tokens
            result.taken += [rows.take(drawn.raw, drawn.processed, batch.sampling.greedy) for rows in batch.top]
        result.taken += [rows.take(logits) for rows in batch.prompts]
        self.seconds.sample += time.perf_counter() - begun

    def _sample(self, logits: torch.Tensor, batch: ForwardBatch, sampling: SamplingBatch) -> Drawn:
        logits = logits[: len(batch.sample_rows)]
        if batch.edits is None:
            return sample(logits, sampling)
        drawn = sample(logits, sampling, batch.edits.apply(logits.float(), self._last_token, self._counts))
        if batch.edits.penalties is not None:
            self._counts.add(batch.edits.penalties, drawn[0])
        return drawn

    def _forcing(self, batch: ForwardBatch) -> contextlib.AbstractContextManager[None]:
        if batch.forced is None:
            return contextlib.nullcontext()
        if self.forcing is None:
            raise RuntimeError(f"{type(self.model).__name__} cannot compute tokens again under replay")
        return self.forcing(batch.forced)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """`[logits_rows, vocab]` of one flattened batch."""
        if isinstance(self.stream, CpuStream):
            self.stream.begin_step(len(batch.input_ids))
        if self.own_caches is not None:
            return self.own_caches.logits(batch.input_ids, batch.position_ids, batch.spans, batch.wanted_rows)
        if self.states is not None:
            self.states.begin(batch.spans)
        inputs = batch.input_ids, batch.position_ids, batch.logits_rows
        if self.graphs is None or batch.bucket is None or batch.attention.table is None:
            return self._pool_logits(*inputs, batch.attention)

        def forward(static: Tensors) -> torch.Tensor:
            ids, positions, rows, *table = static
            return self._pool_logits(ids, positions, rows, batch.attention.with_table(*table))

        table = batch.attention.table
        return self.graphs.run(batch.bucket, (*inputs, batch.attention.out_cache_loc, *table[:2]), forward)

    def _pool_logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor, attention: AttentionBatch
    ) -> torch.Tensor:
        attention = attention.opened()
        self.pool.begin(attention, position_ids)
        output = self.model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            attention_batch=attention,
            logits_to_keep=rows,
            **{self._cache_keyword: self.pool},
        )
        return output.logits[0]

    def forward_rows(self, batch: ForwardBatch) -> list[int]:
        """Rows of each forward that a step makes, with padding."""
        if self.own_caches is not None:
            return [span.end - span.start for span in batch.spans]
        return [len(batch.input_ids)]


def _pad(values: np.ndarray, count: int) -> np.ndarray:
    return np.pad(values, (0, count)) if count else values


def _host_tokens(batch: list[Work], length: int) -> np.ndarray:
    """Known tokens of a step; the places of decodes, which come first, are filled on the device."""
    tokens = np.zeros(length, np.int64)
    at = 0
    for work in batch:
        if not work.is_decode:
            tokens[at : at + work.length] = work.request.tokens(work.start, work.start + work.length)
        at += work.length
    return tokens


def _sampling_batch(works: list[Work]) -> SamplingBatch:
    requests = [work.request for work in works]
    keys = np.array([request.random_key for request in requests], np.uint64)
    params = [request.request.sampling_params for request in requests]
    return SamplingBatch.build(params, uniforms(keys, np.array([work.drawn for work in works])))
