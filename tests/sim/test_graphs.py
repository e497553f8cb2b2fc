"""Decode steps as graphs: a replay gives what the same forward gives when its kernels are queued one by one."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from rollout.config import EngineOptions
from rollout.cuda_graphs import Buckets, GraphRunner, batch_sizes
from rollout.device import AcceleratorStream
from tests.engine_results import assert_alike
from tests.sim.device import DEVICE, SimDevice
from tests.sim.engines import FAMILIES, growing_workload, mixed_workload, on_cpu, on_sim, outcomes
from tests.sim.graphs import NotCapturableError
from tests.sim.streams import copies_late, late

ADVERSARIES = {"late": late, "copies late": copies_late}


def with_tables(rig, sizes=None):
    """The engine on a CPU makes the same steps of static shape, without graphs."""
    rig.built.runner.buckets = Buckets(batch_sizes(sizes, 4))
    return rig


@pytest.fixture(scope="module")
def on_device(open_on_device):
    return lambda family: open_on_device(family, disable_cuda_graph=False)


@pytest.fixture(scope="module")
def expected(path):
    """(step by step over spans, over tables of static shape), both on a CPU."""

    @cache
    def run(family):
        found = []
        for rig in (on_cpu(path(family)), with_tables(on_cpu(path(family)))):
            found.append(outcomes(mixed_workload(rig)))
            rig.built.close()
        return found

    return run


CASES = [
    pytest.param(family, name, marks=[] if name == "late" or family == FAMILIES[0] else pytest.mark.full)
    for family in FAMILIES
    for name in ADVERSARIES
]


@pytest.mark.parametrize(("family", "adversary"), CASES)
def test_replays_equal_the_same_forward_without_graphs(family, adversary, on_device, expected):
    """Bit for bit; and up to rounding the forward that pads nothing. Requests come and go, prompts run in between."""
    rig = on_device(family)
    rig.sim.scheduler.adversary = ADVERSARIES[adversary]
    plain, tables = expected(family)
    replays, forwards = rig.built.runner.graphs.replays, rig.built.engine.stats.forwards
    found = outcomes(mixed_workload(rig))
    assert found == tables
    assert_alike(found, plain)
    assert rig.sim.syncs == []
    assert 0 < rig.built.runner.graphs.replays - replays < rig.built.engine.stats.forwards - forwards


def test_rows_under_replay_run_without_graphs(path):
    """A pool too small for all: what is computed again follows its frozen rows, and slots move under the graphs."""
    options = {"kv_tokens": 48, "max_running_requests": 4}
    cpu = with_tables(on_cpu(path("qwen3_moe"), **options))
    device = on_sim(path("qwen3_moe"), disable_cuda_graph=False, **options)
    device.sim.raises = True
    assert outcomes(growing_workload(device)) == outcomes(growing_workload(cpu))
    assert device.built.engine._scheduler.preemptions == cpu.built.engine._scheduler.preemptions > 0
    cpu.built.close()
    device.built.close()


def test_padding_reaches_nobody(path):
    """Three requests in a batch of four: its last row has the padding slot, and no request has rows of it."""
    rig = on_sim(path("mixtral"), disable_cuda_graph=False, cuda_graph_batch_sizes=[4])
    plain = on_cpu(path("mixtral"))
    found = []
    for each in (rig, plain):
        requests = [each.add(3 + i, i, max_tokens=6, temperature=0, ignore_eos=True) for i in range(3)]
        each.finish()
        found.append(outcomes(requests))
        each.built.close()
    assert {bucket.rows for bucket in rig.built.runner.graphs._recorded} == {4}
    assert_alike(*found)
    assert [len(each["routes"]) for each in found[0]] == [8, 9, 10]


def test_sleep_forgets_graphs_that_read_the_old_pool(path):
    rig = on_sim(path("mixtral"), disable_cuda_graph=False)
    first = [rig.add(5, 1, max_tokens=4, temperature=0, ignore_eos=True)]
    rig.finish()
    rig.built.sleep(level=1)
    assert not rig.built.runner.graphs._recorded
    rig.built.wake(None, 0)
    again = [rig.add(5, 1, max_tokens=4, temperature=0, ignore_eos=True)]
    rig.finish()
    assert outcomes(first) == outcomes(again)
    rig.built.close()


def test_a_forward_that_waits_cannot_be_recorded():
    sim = SimDevice()
    stream = AcceleratorStream(DEVICE, sim)
    graphs = GraphRunner(sim, stream.compute, None)
    given = (torch.ones(2),)

    def run(forward):
        return stream.call(lambda: graphs.run((2, 64), tuple(map(stream.to_device, given)), forward))

    with pytest.raises(NotCapturableError, match="waits for the device"):
        run(lambda tensors: tensors[0] * tensors[0].sum().item())
    assert stream.call(lambda: run(lambda tensors: tensors[0] * 3).cpu()).tolist() == [3, 3]


@pytest.mark.parametrize("sizes", [[], [0], [5]])
def test_batch_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match=r"need sizes from 1 to max_running_requests=4.*disable_cuda_graph=True"):
        EngineOptions(max_running_requests=4, cuda_graph_batch_sizes=sizes)


def test_batches_larger_than_every_graph_run_without(path):
    rig = on_sim(path("mixtral"), disable_cuda_graph=False, cuda_graph_batch_sizes=[1])
    before = rig.built.runner.graphs.replays
    for i in range(2):
        rig.add(3, i, max_tokens=5, temperature=0, ignore_eos=True)
    rig.finish()
    assert rig.built.runner.graphs.replays == before
    rig.built.close()
