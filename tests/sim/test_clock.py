"""The schedule on the device's clock: overlapped steps take max(d, h), synchronous ones d + h.

d is what the step's kernels cost on the simulated device, h what the engine's host code took, counted in calls: two
runs of the same code are equally long on any machine. `python -m tests.bench.bench_overlap` measures the same in real
time. Queueing a forward is free, as the replay of a graph nearly is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from tests.sim.engines import on_sim, tiny
from tests.sim.streams import CountedCalls

STEPS = 20
REQUESTS = 32


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    path = tiny("mixtral", tmp_path_factory.mktemp("mixtral"))
    rig = on_sim(path, max_running_requests=REQUESTS, kv_tokens=64 * REQUESTS, max_batch_tokens=256)
    rig.sim.clock.take_host_time(CountedCalls())
    yield rig
    rig.built.close()


class Times(NamedTuple):
    """Simulated seconds of each step: of the whole, on the device, on the host, and of the latter those beside the
    device even in a synchronous step: between queueing it and waiting for it, the engine notes what it launched."""

    total: np.ndarray
    device: np.ndarray
    host: np.ndarray
    beside: np.ndarray


def last_queued(rig):
    """When the last kernel was queued; looking takes no time."""
    with rig.sim.clock.paused():
        return max(op.queued for op in rig.built.stream.compute.queue if op.name not in ("event", "reuse"))


def steady_decode(rig, overlap, kernel_seconds):
    """Times of steps in which all requests decode."""
    engine, clock = rig.built.engine, rig.sim.clock
    engine.step = engine.overlap_loop if overlap else engine.normal_loop
    clock.kernel, clock.copy = kernel_seconds, kernel_seconds / 100
    requests = [rig.add(4, i, max_tokens=STEPS + 10, temperature=1.0, ignore_eos=True) for i in range(REQUESTS)]
    for _ in range(4):
        rig.turn()
    rig.sim.synchronize()
    rig.turn()  # fills the device again
    rig.turn()
    marks, moments = [], []
    with pytest.MonkeyPatch.context() as patch, clock.read:
        launch, wait = rig.built.runner.launch, rig.sim.scheduler.wait
        patch.setattr(rig.built.runner, "launch", lambda *args: (launch(*args), moments.append(last_queued(rig)))[0])
        patch.setattr(rig.sim.scheduler, "wait", lambda op: (moments.append(clock.now()), wait(op))[1])
        for _ in range(STEPS + 1):
            marks.append((clock.now(), clock.waited, rig.built.stream.compute.busy))
            rig.turn()
    engine.abort(requests)
    rig.finish()
    total, waited, device = [np.diff(column) for column in zip(*marks, strict=True)]
    queued, waiting = moments[: 2 * STEPS : 2], moments[1 : 2 * STEPS : 2]
    return Times(total, device, total - waited, np.subtract(waiting, queued))


@pytest.fixture(scope="module")
def host_seconds_per_kernel(rig):
    tiny_cost = 1e-9
    times = steady_decode(rig, True, tiny_cost)
    return sum(times.host) / sum(times.device) * tiny_cost


@pytest.mark.parametrize("ratio", [1.0, 4.0], ids=["d = h", "d = 4 h"])
def test_synchronous_steps_take_the_sum(rig, host_seconds_per_kernel, ratio):
    times = steady_decode(rig, False, ratio * host_seconds_per_kernel)
    beside = np.minimum(times.beside, times.device)
    assert np.median(times.total / (times.device + times.host - beside)) == pytest.approx(1, rel=0.05)
    assert np.median(beside / times.host) < 0.2
    assert np.median(times.total / (times.device + times.host)) > 0.9


@pytest.mark.parametrize("ratio", [1.0, 4.0], ids=["d = h", "d = 4 h"])
def test_overlapped_steps_take_the_larger_of_both(rig, host_seconds_per_kernel, ratio):
    times = steady_decode(rig, True, ratio * host_seconds_per_kernel)
    larger = sum(np.maximum(times.device, times.host))
    assert max(sum(times.device), sum(times.host)) * 0.95 <= sum(times.total) <= larger * 1.05


def test_finalize_never_waits_for_the_step_that_is_running(rig):
    """On a device that runs only what is waited for: each time the host has results, the next step has not run."""
    engine = rig.built.engine
    engine.step = engine.overlap_loop
    request = rig.add(4, max_tokens=12, temperature=0, ignore_eos=True)
    rig.turn()
    for _ in range(8):
        rig.turn()
        (running,) = engine._in_flight
        assert not running.copy_done.query()
        assert rig.built.stream.compute.queue
    rig.finish()
    assert len(request.output_ids) == 12
