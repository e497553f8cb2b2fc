"""A rank's rows among those of all ranks, on the simulated device: bounds that live on the device wait for it twice,
bounds agreed on the host never do (sglang#24514)."""

from __future__ import annotations

import itertools

import pytest
import torch

from rollout.capture import RoutedExpertsCapturer
from rollout.device import AcceleratorStream
from rollout.loader import load_model, move_model
from rollout.parallel import RankGroup, StepShape, get_dp_local_slice_cpu
from tests.sim.device import DEVICE, ImplicitSyncError, SimDevice

COUNTS = (3, 0, 5)
RANK = 2


@pytest.fixture
def sim():
    return SimDevice()


def on(sim, work):
    with torch.inference_mode(), sim.stream(sim.current):
        return work()


def to_host(sim, tensor):
    host = on(sim, lambda: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
    on(sim, lambda: host.copy_(tensor, non_blocking=True))
    sim.synchronize()
    return host


def rows_of(counts, graph_batch=None):
    """`[rows, sites, K]` of all ranks as a forward lays them out: 10 * rank + i, padding is 99."""
    parts = [[10 * rank + i for i in range(n)] + [99] * ((graph_batch or n) - n) for rank, n in enumerate(counts)]
    return torch.tensor(list(itertools.chain(*parts)), dtype=torch.int32).view(-1, 1, 1).expand(-1, 2, 2)


def test_a_slice_by_device_scalars_waits_twice(sim):
    rows = on(sim, lambda: rows_of(COUNTS).to(DEVICE, non_blocking=True))
    counts = on(sim, lambda: torch.tensor(COUNTS).to(DEVICE, non_blocking=True))
    start, length = on(sim, lambda: (counts[:RANK].sum(), counts[RANK]))
    assert sim.syncs == []
    mine = on(sim, lambda: rows[start : start + length])
    assert len(sim.syncs) == 2
    assert all("test_dp_slice.py:" in line for line in sim.syncs)
    assert to_host(sim, mine)[:, 0, 0].tolist() == [20, 21, 22, 23, 24]
    sim.raises = True
    with pytest.raises(ImplicitSyncError, match=r"test_dp_slice\.py:"):
        on(sim, lambda: rows[start : start + length])


@pytest.mark.parametrize("graph_batch", [None, 8])
def test_a_slice_by_host_integers_never_waits(sim, graph_batch):
    sim.raises = True
    rows = on(sim, lambda: rows_of(COUNTS, graph_batch).to(DEVICE, non_blocking=True))
    start, length = get_dp_local_slice_cpu(COUNTS, RANK, graph_batch is not None, graph_batch)
    mine = on(sim, lambda: rows[start : start + length])
    assert sim.syncs == []
    assert to_host(sim, mine)[:, 0, 0].tolist() == [20, 21, 22, 23, 24]


@pytest.mark.parametrize("graph_batch", [None, 8])
def test_the_capture_of_a_rank_takes_its_own_rows_without_a_wait(sim, path, graph_batch):
    """Its routers see the rows of all ranks, with one padded row of the rank that has no tokens."""
    loaded, ranks = load_model(str(path("qwen3_moe")), "float32", False), RankGroup(RANK, 3, "allgather")
    stream = AcceleratorStream(DEVICE, sim)
    stream.run(lambda: move_model(loaded.model, DEVICE))
    capturer = stream.call(lambda: RoutedExpertsCapturer(loaded.model, loaded.spec, 8, ranks))
    sim.syncs.clear()
    assert capturer.max_rows == 24
    shape = StepShape(COUNTS, graph_batch)
    ranks.begin(0, shape)
    laid_out = rows_of(COUNTS, graph_batch)[:, 0] if graph_batch else rows_of(shape.rows)[:, 0]
    seen = on(sim, lambda: laid_out.to(DEVICE, non_blocking=True))
    capturer.on_forward_begin()
    for site in range(2):
        on(sim, lambda site=site: capturer._write(site, seen + site))
    own = torch.arange(COUNTS[RANK])
    captured = on(sim, lambda: capturer.on_forward_end(own, forwards=[shape.rows[RANK]]))
    capturer.close()
    assert sim.syncs == []
    expected = [[[20 + i] * 2, [21 + i] * 2] for i in range(5)]
    assert to_host(sim, captured.routed_experts).tolist() == expected
