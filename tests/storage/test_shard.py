"""Shards of a batch hold the rows, columns and sites of one rank, and no copies where numpy has views."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import ReplayBatch, RoutingSpec, Site, Trace
from storage.shard import PER_SEQUENCE, PER_TOKEN
from tests.storage.builders import SPEC, make_trace, make_traces

PADDINGS = ["right", "left", "split", "packed"]


def collate(padding: str = "right", multiple: int = 1, count: int = 5) -> ReplayBatch:
    """Traces of 5, 6, 7, 8 and 9 tokens."""
    return ReplayBatch.collate(
        make_traces(0, count), spec=SPEC, padding=padding, pad_to_multiple_of=multiple, advantages=range(count)
    )


def columns(batch: ReplayBatch) -> list[int]:
    """Of a batch whose input ids were replaced by column numbers, which the shard has."""
    return batch.input_ids[0].tolist()


def numbered(multiple: int, padding: str = "right", count: int = 5) -> ReplayBatch:
    batch = collate(padding, multiple, count)
    batch.input_ids[:] = np.arange(batch.input_ids.shape[1])
    return batch


def test_every_field_is_known_to_the_shards() -> None:
    whole = {"spec", "prompt_width", "cu_seqlens", "cp_size"}
    assert {field.name for field in fields(ReplayBatch)} == {*PER_TOKEN, *PER_SEQUENCE} | whole


@pytest.mark.parametrize("padding", PADDINGS)
def test_data_parallel_shards_are_views_of_their_own_sequences(padding: str) -> None:
    batch = collate(padding)
    shards = [batch.shard(dp=(rank, 2)) for rank in range(2)]
    assert [shard.sample_ids for shard in shards] == [batch.sample_ids[:3], batch.sample_ids[3:]]
    axis = 1 if padding == "packed" else 0
    for name in PER_TOKEN:
        parts = [getattr(shard, name) for shard in shards]
        assert np.array_equal(np.concatenate(parts, axis), getattr(batch, name)), name
        assert all(np.shares_memory(part, getattr(batch, name)) for part in parts), name
        assert not np.shares_memory(*parts), name
    assert [shard.rewards.shape for shard in shards] == [(3,), (2,)]


def test_a_packed_shard_counts_its_columns_from_zero() -> None:
    shard = collate("packed").shard(dp=(1, 2))
    assert shard.cu_seqlens.tolist() == [0, 8, 17]
    assert shard.input_ids.shape == (1, 17)
    assert shard.cu_seqlens.dtype == np.int32


@pytest.mark.parametrize("padding", PADDINGS)
def test_micro_batches_cut_a_shard_further_down_to_single_sequences(padding: str) -> None:
    batch = collate(padding).shard(dp=(0, 2))
    parts = batch.micro_batches(3)
    assert [part.sample_ids for part in parts] == [[name] for name in batch.sample_ids]
    for part, trace in zip(parts, make_traces(0), strict=False):
        assert part.input_ids[part.attention_mask == 1].tolist() == trace.token_ids
        assert np.shares_memory(part.routed_experts, batch.routed_experts)


def test_sites_of_a_pipeline_stage_are_a_view_with_their_own_spec_and_k() -> None:
    spec = RoutingSpec((Site("a", 0, 300, 3), Site("b", 1, 8, 2), Site("c", 2, 8, 1)))
    ids = np.zeros((6, 3, 3), int)
    ids[:, 0] = [7, 8, 299]
    ids[:, 1, :2] = [4, 5]
    ids[:, 2, 0] = 6
    batch = ReplayBatch.collate([make_trace(routed_experts=ids)], spec=spec)
    stage = batch.sites(slice(1, None))
    assert stage.spec == RoutingSpec(spec.sites[1:])
    assert stage.routed_experts[0, 0].tolist() == [[4, 5], [6, 0]]
    assert np.shares_memory(stage.routed_experts, batch.routed_experts)
    assert stage.input_ids is batch.input_ids


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("contiguous", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        ("zigzag", [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
    ],
)
def test_context_parallel_columns(layout: str, expected: list[list[int]]) -> None:
    batch = numbered(multiple=12)
    shards = [batch.cp(cp_rank=rank, cp_size=2, layout=layout) for rank in range(2)]
    assert [columns(shard) for shard in shards] == expected
    for shard, own in zip(shards, expected, strict=True):
        one_range = own == list(range(own[0], own[0] + 6))
        for name in PER_TOKEN:
            assert np.array_equal(getattr(shard, name), getattr(batch, name)[:, own]), name
            assert np.shares_memory(getattr(shard, name), getattr(batch, name)) == one_range, name
        assert shard.rewards is batch.rewards


def test_context_parallel_of_a_packed_batch_cuts_each_sequence() -> None:
    batch = numbered(multiple=4, padding="packed", count=2)
    assert batch.cu_seqlens.tolist() == [0, 8, 16]
    zigzag = [batch.cp(cp_rank=rank, cp_size=2) for rank in range(2)]
    assert [columns(shard) for shard in zigzag] == [[0, 1, 6, 7, 8, 9, 14, 15], [2, 3, 4, 5, 10, 11, 12, 13]]
    assert zigzag[0].position_ids.tolist() == [[0, 1, 6, 7, 0, 1, 6, 7]]
    assert zigzag[0].cu_seqlens.tolist() == [0, 4, 8]
    contiguous = batch.cp(cp_rank=1, cp_size=4, layout="contiguous")
    assert columns(contiguous) == [2, 3, 10, 11]
    assert columns(contiguous.shard(dp=(1, 2))) == [10, 11]


def test_a_shard_reads_no_row_of_another_rank() -> None:
    """The other rank's rows are replaced by a marker after collate; nothing of it shows up in any shard's arrays."""
    batch = collate(multiple=12)
    batch.routed_experts[3:] = 77
    batch.routed_experts[:, 3:9] = 77
    batch.routed_experts[:, :, 1:] = 77
    shard = batch.shard(dp=(0, 2), cp=(0, 2), pp=slice(0, 1))
    assert shard.routed_experts.shape == (3, 6, 1, 2)
    assert not (shard.routed_experts == 77).any()


@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    padding=st.sampled_from(PADDINGS),
    extra=st.integers(0, 2),
)
@settings(max_examples=40, deadline=None)
def test_shards_of_all_ranks_hold_every_cell_once_as_numpy_cuts_them(
    sizes: tuple[int, int, int, int], layout: str, padding: str, extra: int
) -> None:
    """Every cell of the batch gets its own number; the reference cuts an array of these numbers."""
    dp, cp, pp, parts = sizes
    batch = collate(padding, multiple=2 * cp, count=dp * parts + extra)
    cells = np.arange(batch.num_rows * 6).reshape(batch.routed_experts.shape)
    batch = replace(batch, routed_experts=cells)
    stages = [slice(3 * i // pp, 3 * (i + 1) // pp) for i in range(pp)]
    seen = []
    for d, c, p in np.ndindex(dp, cp, pp):
        cut = batch.shard(dp=(d, dp), cp=(c, cp), pp=stages[p], micro_batches=parts, layout=layout)
        own = np.array_split(np.array_split(np.arange(len(batch.sample_ids)), dp)[d], parts)
        for part, wanted in zip(cut, own, strict=True):
            assert np.array_equal(part.routed_experts, reference(batch, wanted, (c, cp), stages[p], layout))
            assert part.sample_ids == [batch.sample_ids[index] for index in wanted]
            seen.append(part.routed_experts.ravel())
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(cells.size))


def reference(batch: ReplayBatch, wanted: np.ndarray, cp: tuple[int, int], stage: slice, layout: str) -> np.ndarray:
    """Sequences by fancy indexing, columns by `array_split`."""
    rank, size = cp
    if batch.cu_seqlens is None:
        sequences = [batch.routed_experts[wanted]]
    else:
        ends = batch.cu_seqlens
        sequences = [batch.routed_experts[:, ends[i] : ends[i + 1]] for i in wanted]
    picked = []
    for cells in sequences:
        if layout == "contiguous":
            picked.append(np.array_split(cells, size, axis=1)[rank])
        else:
            chunks = np.array_split(cells, 2 * size, axis=1)
            picked += [chunks[rank], chunks[-1 - rank]]
    return np.concatenate(picked, axis=1)[:, :, stage]


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda b: b.shard(dp=(2, 2)), "dp: rank 2 of 2 does not exist"),
        (lambda b: b.shard(dp=(0, 6)), r"5 sequences cannot be split into 6 parts \(dp\)"),
        (lambda b: b.micro_batches(6), r"5 sequences cannot be split into 6 parts \(micro-batches\)"),
        (lambda b: b.micro_batches(0), "cannot make 0 micro-batches"),
        (lambda b: b.sites(slice(3, 5)), r"slice\(3, 5, None\) selects none of the 3 sites"),
        (lambda b: b.cp(cp_rank=-1, cp_size=2), "cp: rank -1 of 2 does not exist"),
        (lambda b: b.cp(cp_rank=0, cp_size=2, layout="ring"), "'ring' is not supported; supported: zigzag, contiguous"),
        (lambda b: b.cp(cp_rank=0, cp_size=2), "the batch has 9 columns, zigzag over 2 ranks .* pad_to_multiple_of=4"),
        (
            lambda b: b.cp(cp_rank=0, cp_size=3, layout="contiguous").cp(cp_rank=0, cp_size=3),
            "already a shard of cp_size 3",
        ),
    ],
)
def test_refusals(cut, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut(collate())


def test_a_packed_sequence_that_does_not_divide_is_named() -> None:
    traces = [make_trace(0, 0, completion=5), make_trace(0, 1)]
    batch = ReplayBatch.collate(traces, spec=SPEC, padding="packed")
    with pytest.raises(
        ValueError, match="trace 'run/0/1/0' has 7 columns, contiguous over 2 ranks needs a multiple of 2"
    ):
        batch.cp(cp_rank=0, cp_size=2, layout="contiguous")


def test_a_context_parallel_shard_cannot_score_tokens_alone() -> None:
    shard = numbered(multiple=4).cp(cp_rank=0, cp_size=2)
    with pytest.raises(ValueError, match="a shard of cp_size 2 lacks the logits before its first column"):
        shard.token_logprobs(torch.zeros(5, 6, 100))


def test_tensors_of_a_shard_share_its_memory() -> None:
    batch = collate()
    part: list[Trace] | ReplayBatch = batch.shard(dp=(1, 2))
    part.tensors()["input_ids"][0, 0] = 1234
    assert batch.input_ids[3, 0] == 1234
