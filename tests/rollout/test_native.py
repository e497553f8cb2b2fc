"""Our own kernels against float64 by hand; their bits, whoever shares the call; and engines that use them."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from rollout import RolloutClient, SamplingParams
from rollout.attention_plan import NativeReads, Span
from rollout.experts import COMPACT, Layout, experts_output
from rollout.native import NativeKernels, fit_attention, fits
from rollout.native_build import load_library
from rollout.native_layers import Native, use_native_products
from rollout.reach import Reach
from tests.rollout.test_experts import BIG, HEIGHTS, Experts, by_hand, computed, inputs

WRONG = "computes with torch's kernels, ours are wrong here"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return NativeKernels(load_library(), request.param)


def linear(kernels: NativeKernels, rows: torch.Tensor, weight: torch.Tensor, *groups: list[int]) -> torch.Tensor:
    out = torch.full((len(rows), weight.shape[1]), float("nan"), dtype=weight.dtype)
    kernels.grouped_linear(rows, weight, out, *(torch.tensor(each) for each in groups))
    return out


@dtypes
def test_products_are_those_of_float64_and_other_rows_are_left_alone(kernels, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((50, 96), (4, 37, 96)))
    experts, starts, heights = [0, 1, 3, 2], [0, 1, 10, 45], [1, 9, 35, 3]
    out = linear(kernels, rows, weight, experts, starts, heights)
    for expert, start, height in zip(experts, starts, heights, strict=True):
        expected = rows[start : start + height].double() @ weight[expert].double().T
        torch.testing.assert_close(out[start : start + height].double(), expected, atol=1e-5, rtol=TOLERANCE[dtype])
    assert out[48:].isnan().all()


def test_rows_of_another_dtype_are_refused(kernels) -> None:
    with pytest.raises(ValueError, match=r"rows of 16 torch.bfloat16 for weights of 16 torch.float32"):
        linear(kernels, torch.zeros(2, 16).bfloat16(), torch.zeros(1, 4, 16), [0], [0], [2])


@dtypes
def test_a_row_has_the_same_bits_in_a_group_of_any_height(kernels, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((20, 64), (1, 33, 64)))
    alone = torch.cat([linear(NativeKernels(load_library()), row[None], weight, [0], [0], [1]) for row in rows])
    for height in range(1, 21):
        assert torch.equal(linear(kernels, rows, weight, [0], [0], [height])[:height], alone[:height])


@dtypes
def test_sums_over_slots(kernels, dtype) -> None:
    rows = torch.randn(12, 48).to(dtype)
    where, weights = torch.randperm(12).view(4, 3), torch.rand(4, 3).to(dtype)
    found = kernels.weighted_sum(rows, where.flatten(), weights)
    expected = (rows.double()[where] * weights.double()[:, :, None]).sum(1)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def attention(kernels: NativeKernels, queries: torch.Tensor, *given: Any) -> torch.Tensor:
    out = torch.full((*queries.shape[:2], given[1].shape[-1]), float("nan"), dtype=given[1].dtype)
    kernels.attention(queries, *given, out)
    return out


def attended(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """One query, `[heads, dim]`, in float64."""
    repeat = query.shape[0] // keys.shape[1]
    k, v = (s[first : first + count].double().repeat_interleave(repeat, dim=1) for s in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), k) * query.shape[1] ** -0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


@dtypes
@pytest.mark.parametrize("shape", [(4, 2, 64, 64), (1, 8, 32, 16), (2, 1, 16, 48), (1, 3, 48, 80), (2, 4, 96, 128)])
def test_attention_is_that_of_float64_and_reads_no_other_key(kernels, dtype, shape) -> None:
    kv_heads, repeat, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(0)
    lens, gap = [1, 2, 15, 16, 17, 31, 33, 200], 3
    first = np.cumsum([gap, *[n + gap for n in lens[:-1]]])
    slots = int(first[-1]) + lens[-1] + gap
    queries = torch.randn(len(lens), kv_heads * repeat, key_dim, generator=generator).to(dtype)
    keys, values = (torch.full((slots, kv_heads, dim), float("nan"), dtype=dtype) for dim in (key_dim, value_dim))
    for start, count in zip(first, lens, strict=True):
        for store in (keys, values):
            store[start : start + count] = torch.randn(count, *store.shape[1:], generator=generator).to(dtype)
    given = torch.from_numpy(first), torch.tensor(lens)
    found = attention(kernels, queries, keys, values, *given, max(lens), None)
    for i, (start, count) in enumerate(zip(first.tolist(), lens, strict=True)):
        expected = attended(queries[i], keys, values, start, count)
        torch.testing.assert_close(found[i].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        alone = attention(
            kernels, queries[i : i + 1], keys, values, given[0][i : i + 1], given[1][i : i + 1], count, None
        )
        assert torch.equal(alone[0], found[i])


def test_large_scores_do_not_overflow_and_nan_is_not_hidden(kernels) -> None:
    keys = torch.zeros(3, 1, 16)
    keys[:, 0, 0] = torch.tensor([300.0, -300.0, 299.0])
    values = torch.arange(3.0)[:, None, None].expand(3, 1, 16).contiguous()
    query, where = torch.full((1, 1, 16), 4.0), (torch.tensor([0]), torch.tensor([3]))
    found = attention(kernels, query, keys, values, *where, 3, 1.0)
    expected = 2 / (1 + np.exp(4.0))
    torch.testing.assert_close(found, torch.full((1, 1, 16), expected, dtype=torch.float32))
    query[0, 0, 3] = float("nan")
    assert attention(kernels, query, keys, values, *where, 3, 1.0).isnan().all()
    keys[1, 0, 0] = float("inf")
    assert attention(kernels, torch.ones(1, 1, 16), keys, values, *where, 3, 1.0).isnan().all()


def test_reads_cover_each_token_of_each_span_and_respect_the_reach() -> None:
    spans = [Span(0, 1, 10, 6, 8), Span(1, 4, 20, 5, 8)]
    reads = NativeReads.plan(NativeKernels(load_library()), spans)
    assert (reads.first.tolist(), reads.kv_lens.tolist()) == ([10, 20, 20, 20], [6, 3, 4, 5])
    first, lens, longest = reads.seen(Reach(window=4))
    assert (first.tolist(), lens.tolist(), longest) == ([12, 20, 20, 21], [4, 3, 4, 4], 4)


def test_what_the_kernels_take() -> None:
    weight = torch.zeros(2, 8, 32)
    assert fits(weight)
    assert fits(weight.bfloat16())
    assert not fits(weight.half())
    assert not fits(weight.transpose(1, 2))
    assert not fits(torch.zeros(2, 8, 24))
    assert not fits(torch.zeros(2, 8, 16, dtype=torch.bfloat16))
    assert fit_attention(weight, weight)
    assert not fit_attention(weight, weight.bfloat16())
    assert not fit_attention(torch.zeros(2, 8, 40), weight)


@pytest.mark.parametrize("most_rows", [3, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size", [64, BIG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_small_and_large_groups_are_those_of_a_loop_over_tokens(
    dtype, size, has_bias, most_rows, kernels
) -> None:
    experts = Experts(dtype, size, False, has_bias)
    experts.native_products = {name: Native(kernels, most_rows) for name in ("gate_up_proj", "down_proj")}
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for layout in (COMPACT, Layout(multiple=32)):
        found, expected = computed(experts, dtype, size, layout)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_several_slots_of_a_token_are_weighed_and_added() -> None:
    experts = Experts(torch.float32, 64, False, False)
    hidden, _, _ = inputs(torch.float32, 64)
    ids = torch.stack([torch.randperm(len(HEIGHTS))[:3] for _ in hidden])
    weights = torch.rand(ids.shape)
    use_native_products(torch.nn.ModuleList([experts]), NativeKernels(load_library()))
    assert set(experts.native_products) == {"gate_up_proj", "down_proj"}
    found = experts_output(experts, hidden, ids, weights, COMPACT)
    expected = sum(by_hand(experts, hidden, ids[:, s : s + 1], weights[:, s : s + 1]) for s in range(3))
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_experts_that_the_kernels_do_not_take_keep_torchs_products() -> None:
    transposed, odd = Experts(torch.float32, 64, True, False), Experts(torch.float32, 40, False, False)
    use_native_products(torch.nn.ModuleList([transposed, odd]), NativeKernels(load_library()))
    assert not getattr(transposed, "native_products", {})
    assert odd.native_products == {}


def test_an_engine_uses_them_and_draws_the_tokens_that_it_draws_without(checkpoint, monkeypatch) -> None:
    calls: list[int] = []
    attention = NativeKernels.attention
    monkeypatch.setattr(
        NativeKernels, "attention", lambda self, q, *given: (calls.append(len(q)), attention(self, q, *given))[1]
    )
    prompts = [[5, 6, 7], [8] * 20, [9, 10]]
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = {}
    for setting in (True, False):
        calls.clear()
        with RolloutClient.local(
            checkpoint("qwen3_moe", head_dim=16), dtype="float32", native_kernels=setting
        ) as client:
            found[setting] = client.sample(prompts, sampling_params=greedy)
        assert (3 in calls) is setting
    for one, other in zip(found[True], found[False], strict=True):
        assert np.array_equal(one.completion_ids, other.completion_ids)
        assert np.array_equal(one.routed_experts, other.routed_experts)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def wrong_attention(self: Any, *given: Any) -> None:
    given[-1].zero_()


def wrong_result(real: Any) -> Any:
    return lambda self, *given: real(self, *given) * 1.5


@pytest.mark.parametrize(
    ("kernel", "line_begins"),
    [("attention", "attends with torch's kernels"), ("linear", WRONG), ("gated_experts", WRONG)],
)
def test_kernels_that_are_wrong_on_a_machine_are_given_up_at_start(
    checkpoint, monkeypatch, caplog, kernel, line_begins
) -> None:
    wrong = wrong_attention if kernel == "attention" else wrong_result(getattr(NativeKernels, kernel))
    monkeypatch.setattr(NativeKernels, kernel, wrong)
    path, greedy = (
        checkpoint("qwen3_moe", hidden_size=512),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
    )
    with caplog.at_level(logging.WARNING, logger="rollout.cache_choice"):
        with RolloutClient.local(path, dtype="float32") as client:
            (found,) = client.sample([[5, 6, 7]], sampling_params=greedy)
    (line,) = caplog.messages
    assert line.startswith(f"Qwen3MoeForCausalLM {line_begins}: ")
    assert "differs from the plain model" in line
    with RolloutClient.local(path, dtype="float32", native_kernels=False) as client:
        (expected,) = client.sample([[5, 6, 7]], sampling_params=greedy)
    assert np.array_equal(found.completion_ids, expected.completion_ids)


def test_wrong_kernels_are_an_error_where_engines_must_compute_alike(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(NativeKernels, "gated_experts", wrong_result(NativeKernels.gated_experts))
    with pytest.raises(
        ValueError, match=r"differs from the plain model.*With native_kernels=False, in all engines, it"
    ):
        RolloutClient.local(checkpoint("qwen3_moe"), dtype="float32", batch_invariant=True)
