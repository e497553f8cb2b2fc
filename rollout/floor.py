"""What a machine can do at best, to hold a step against: bytes read and operations per second, as torch does them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from storage.sites import find_routers

READ_BYTES = 256 * 2**20  # more than any cache holds
GEMM_SIZE = 2048
REPEATS = 5


class Floor(NamedTuple):
    """Bytes per second that a matrix-vector product reads, and operations per second of a square matrix product.

    >>> floor = Floor(read=11.4e9, flops=137e9)
    >>> f"{1e3 * floor.seconds_to_read(57e6):.1f} ms"
    '5.0 ms'
    """

    read: float
    flops: float

    def seconds_to_read(self, size: float) -> float:
        """Seconds that reading `size` bytes takes at least."""
        return size / self.read


@torch.inference_mode()
def measure_floor(dtype: torch.dtype, threads: int) -> Floor:
    """Measured with so many threads; the best of a few tries."""
    torch.set_num_threads(threads)
    columns = 4096
    matrix = torch.ones(READ_BYTES // columns // dtype.itemsize, columns, dtype=dtype)
    vector = torch.ones(columns, dtype=dtype)
    a, b = (torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=dtype) for _ in range(2))
    return Floor(READ_BYTES / _best(lambda: matrix @ vector), 2 * GEMM_SIZE**3 / _best(lambda: a @ b))


def _best(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def weight_bytes_of_a_step(model: Any, batch: int) -> float:
    """Bytes of weights that one decode step reads: all but the embedding, and of the experts those that `batch` tokens
    hit, when each picks evenly."""
    site = find_routers(model)[0].site
    hit = 1.0 - (1.0 - site.top_k / site.num_experts) ** batch
    embedding = model.get_input_embeddings().weight
    total = 0.0
    for name, parameter in model.named_parameters():
        if parameter is embedding and model.get_output_embeddings().weight is not embedding:
            continue
        total += parameter.nbytes * (hit if ".experts." in name else 1.0)
    return total
