"""Weights keep values and strides when they move, and their memory is what the kernel gives to those who ask."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rollout import RolloutClient, SamplingParams
from rollout.huge_pages import MIN_BYTES, PAGE_BYTES, use_huge_pages

SMAPS = Path("/proc/self/smaps")
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


def model_of(*weights: torch.Tensor) -> Any:
    model = nn.Module()
    for i, weight in enumerate(weights):
        model.register_parameter(str(i), nn.Parameter(weight))
    return model


def weight_of(dtype: torch.dtype = torch.float32, nbytes: int = MIN_BYTES) -> torch.Tensor:
    return torch.randn(nbytes // dtype.itemsize // 1024, 1024).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_strides_and_identity_stay(dtype) -> None:
    plain, turned, cut = weight_of(dtype), weight_of(dtype, 3 * MIN_BYTES).t(), weight_of(dtype, 2 * MIN_BYTES)[:, :514]
    model = model_of(plain, turned, cut)
    before = [(w, w.clone(), w.stride()) for w in model.parameters()]
    use_huge_pages(model)
    for (same, values, stride), weight in zip(before, model.parameters(), strict=True):
        assert weight is same
        assert torch.equal(weight, values)
        assert weight.stride() == stride
        assert weight.data_ptr() % PAGE_BYTES == 0
        assert not weight.is_inference()
    where = [w.data_ptr() for w in model.parameters()]
    use_huge_pages(model)
    assert [w.data_ptr() for w in model.parameters()] == where


def test_small_weights_stay_where_they_are() -> None:
    model = model_of(weight_of(nbytes=MIN_BYTES - 4096))
    where = next(model.parameters()).data_ptr()
    use_huge_pages(model)
    assert next(model.parameters()).data_ptr() == where


@pytest.mark.skipif(
    not HAS_HUGE_PAGES or "VmFlags" not in SMAPS.read_text(), reason="this kernel has none, or does not tell"
)
def test_the_kernel_is_asked_for_huge_pages() -> None:
    def flags(weight: torch.Tensor) -> str:
        for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
            start, end = (int(part, 16) for part in area.split()[0].split("-"))
            if start <= weight.data_ptr() < end:
                return re.search(r"VmFlags: (.*)", area)[1]
        raise AssertionError("the weight is nowhere")

    model = model_of(weight_of(nbytes=32 * PAGE_BYTES))
    (weight,) = model.parameters()
    assert " hg" not in flags(weight)
    use_huge_pages(model)
    assert " hg" in flags(weight)


def test_a_weight_that_repeats_itself_stays() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(1024).expand(2048, 1024))
    use_huge_pages(model)
    assert model.weight.stride() == (0, 1)


def test_weights_that_sleep_and_wake_move_again(checkpoint) -> None:
    path = checkpoint("qwen3_moe", num_hidden_layers=1, hidden_size=256, moe_intermediate_size=1024)
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with RolloutClient.local(path, dtype="float32") as client:
        large = [w for w in client.backend._built.runner.model.parameters() if w.nbytes >= MIN_BYTES]
        assert large
        (before,) = client.sample([[5, 6, 7]], sampling_params=greedy)
        for level, source in ((1, None), (2, path)):
            client.sleep(level=level)
            client.wake() if source is None else client.wake(source, version=1)
            assert all(w.data_ptr() % PAGE_BYTES == 0 for w in large)
            (after,) = client.sample([[5, 6, 7]], sampling_params=greedy)
            assert np.array_equal(before.completion_ids, after.completion_ids)
