"""Weights in pages of 2 MiB, which a processor looks up faster than 512 small ones while it streams through them.

Linux gives such pages to memory that asks for them (see /sys/kernel/mm/transparent_hugepage/enabled). numpy asks for
its arrays of 4 MiB and more, torch does not. On an AMD EPYC our kernels read expert weights at 19 to 30 GB/s instead of
13 to 26.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

PAGE_BYTES = 2 * 2**20
MIN_BYTES = 2 * PAGE_BYTES
CPU = torch.device("cpu")


@torch.inference_mode(False)
@torch.no_grad()
def use_huge_pages(model: Any) -> None:
    """Copy the large weights of `model` that are on a CPU, one at a time, to memory that begins with such a page.

    Weights that were parts of one memory no longer are.
    """
    for weight in model.parameters():
        is_large = weight.device.type == "cpu" and weight.nbytes >= MIN_BYTES
        if is_large and weight.data_ptr() % PAGE_BYTES and all(weight.stride()):
            weight.data = empty_like(weight).copy_(weight)


def empty_like(form: torch.Tensor, device: torch.device = CPU) -> torch.Tensor:
    """On `device`, with the shape, strides and dtype of `form`; what is large, on a CPU, begins with a huge page."""
    if device.type != "cpu" or form.nbytes < MIN_BYTES:
        return torch.empty_like(form, device=device)
    values = 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))
    memory = torch.from_numpy(np.empty(values * form.itemsize + PAGE_BYTES, np.uint8))
    start = -memory.data_ptr() % PAGE_BYTES
    aligned = memory[start : start + values * form.itemsize].view(form.dtype)
    return aligned.as_strided(form.shape, form.stride(), aligned.storage_offset())
