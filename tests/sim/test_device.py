"""The simulated device: what is queued, when values exist, what counts as waiting, and what it costs."""

from __future__ import annotations

import pytest
import torch

from rollout.device import AcceleratorStream
from tests.sim.device import DEVICE, ImplicitSyncError, SimDevice
from tests.sim.streams import Seeded, copies_late, early, late

ADVERSARIES = [late, early, copies_late, Seeded(3)]


@pytest.fixture
def sim():
    return SimDevice(late)


def on(sim, work, stream=None):
    with torch.inference_mode(), sim.stream(stream or sim.current):
        return work()


def pinned(sim, values):
    host = on(sim, lambda: torch.empty(len(values), dtype=torch.float32, pin_memory=True))
    on(sim, lambda: host.copy_(torch.tensor(values)))
    return host


def to_pinned(sim, tensor, stream=None):
    host = on(sim, lambda: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
    on(sim, lambda: host.copy_(tensor, non_blocking=True), stream)
    return host


# --- values and order -------------------------------------------------------------------------------------------


def test_shapes_are_known_at_once_and_values_when_the_kernel_has_run(sim):
    out = on(sim, lambda: torch.arange(6, device=DEVICE).view(2, 3) * 2)
    assert (tuple(out.shape), out.dtype, sim.kernels) == ((2, 3), torch.int64, 3)
    assert out.box.value is None
    host = to_pinned(sim, out)
    sim.synchronize()
    assert host.tolist() == [[0, 2, 4], [6, 8, 10]]


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_a_copy_is_poison_until_its_event(adversary):
    sim = SimDevice(adversary)
    host = to_pinned(sim, on(sim, lambda: torch.ones(2, device=DEVICE)))
    event = sim.current.record_event()
    assert event.query() == (host.tolist() == [1, 1]) or adversary is not late
    assert adversary is not late or host.view(torch.uint8).tolist() == [0xEE] * 8
    event.synchronize()
    assert event.query()
    assert host.tolist() == [1, 1]


def test_an_event_waits_for_its_own_stream_up_to_itself(sim):
    other = sim.Stream()
    first = to_pinned(sim, on(sim, lambda: torch.ones(1, device=DEVICE)))
    event = sim.current.record_event()
    behind = to_pinned(sim, on(sim, lambda: torch.ones(1, device=DEVICE)))
    elsewhere = to_pinned(sim, on(sim, lambda: torch.ones(1, device=DEVICE), other), other)
    event.synchronize()
    assert first.tolist() == [1]
    assert 1 not in behind.tolist() + elsewhere.tolist()


def test_a_view_sees_later_writes_and_a_copy_does_not(sim):
    buffer = on(sim, lambda: torch.zeros(3, device=DEVICE))
    view, copy = on(sim, lambda: (buffer[:2], buffer[:2].clone()))
    on(sim, lambda: buffer.fill_(7))
    read = to_pinned(sim, view), to_pinned(sim, copy)
    sim.synchronize()
    assert [host.tolist() for host in read] == [[7, 7], [0, 0]]


@pytest.mark.parametrize(("waits", "expected"), [(True, [7.0]), (False, None)])
def test_a_stream_that_does_not_wait_for_another_reads_memory_that_nobody_wrote(sim, waits, expected):
    copy = sim.Stream()
    filled = on(sim, lambda: torch.full((1,), 7.0, device=DEVICE))
    if waits:
        copy.wait_stream(sim.current)
    host = to_pinned(sim, filled, copy)
    copy.synchronize()
    assert (host.tolist() == [7.0]) == (expected is not None)


def test_pinned_memory_is_read_when_the_copy_runs_and_pageable_memory_at_once(sim):
    fixed, pageable = pinned(sim, [1.0]), torch.tensor([1.0])
    moved = on(sim, lambda: [x.to(DEVICE, non_blocking=True) for x in (fixed, pageable)])
    on(sim, lambda: [x.fill_(2) for x in (fixed, pageable)])
    read = [to_pinned(sim, x) for x in moved]
    sim.synchronize()
    assert [host.tolist() for host in read] == [[2], [1]]


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_is_used_again_unless_another_stream_was_recorded(recorded):
    """The host drops a tensor that a copy on another stream has not read yet."""
    sim = SimDevice(copies_late)
    copy = sim.Stream()
    tensor = on(sim, lambda: torch.ones(1, device=DEVICE))
    copy.wait_stream(sim.current)
    host = to_pinned(sim, tensor, copy)
    if recorded:
        tensor.record_stream(copy)
    del tensor
    on(sim, lambda: torch.zeros(1, device=DEVICE))
    sim.synchronize()
    assert (host.tolist() == [1]) == recorded


# --- what waits -------------------------------------------------------------------------------------------------

WAITING = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "slice bounds on the device": lambda x: torch.zeros(9, device=DEVICE)[: x[2].long()],
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "pageable to the host": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "blocking to the device": lambda x: torch.ones(3).to(DEVICE),
}
NOT_WAITING = {
    "slice": lambda x: x[1:2] + 1,
    "gather": lambda x: x[torch.arange(2, device=DEVICE)],
    "scatter": lambda x: x.index_fill_(0, torch.arange(2, device=DEVICE), -torch.inf),
    "pageable to the device": lambda x: torch.ones(3).to(DEVICE, non_blocking=True),
    "where with values": lambda x: torch.where(x > 0, x, 0.0),
    "topk": lambda x: x.topk(2).indices,
}


@pytest.mark.parametrize("call", WAITING)
def test_a_call_that_waits_is_logged_with_its_line_and_raised_on_demand(sim, call):
    tensor = on(sim, lambda: torch.arange(3.0, device=DEVICE))
    on(sim, lambda: WAITING[call](tensor))
    assert len(sim.syncs) == 1
    assert "test_device.py:" in sim.syncs[0]
    sim.raises = True
    with pytest.raises(ImplicitSyncError, match=r"test_device\.py:"):
        on(sim, lambda: WAITING[call](tensor))


@pytest.mark.parametrize("call", NOT_WAITING)
def test_a_call_that_does_not_wait_is_not_logged(sim, call):
    tensor = on(sim, lambda: torch.arange(3.0, device=DEVICE))
    on(sim, lambda: NOT_WAITING[call](tensor))
    assert sim.syncs == []


def test_a_host_tensor_in_a_kernel_is_an_error(sim):
    with pytest.raises(RuntimeError, match="mixes a tensor on the device with one on cpu"):
        on(sim, lambda: torch.ones(3, device=DEVICE) + torch.ones(3))


# --- the clock --------------------------------------------------------------------------------------------------


def test_simulated_time_follows_the_costs_and_the_waits(sim):
    """Three kernels of 2 s, then a copy of 5 s on another stream beside two more kernels."""
    sim.clock.kernel, sim.clock.copy = 2.0, 5.0
    sim.clock.take_host_time(lambda: 0.0)
    copy = sim.Stream()
    start = sim.clock.now()
    tensor = on(sim, lambda: torch.ones(1, device=DEVICE) + 1 + 1)
    copy.wait_stream(sim.current)
    to_pinned(sim, tensor, copy)
    on(sim, lambda: tensor + 1 + 1)
    sim.current.synchronize()
    assert sim.clock.now() - start == pytest.approx(10)
    copy.synchronize()
    assert sim.clock.now() - start == pytest.approx(11)
    assert sim.clock.waited == pytest.approx(11)


# --- AcceleratorStream on it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_outputs_are_there_once_the_event_is_done(adversary):
    sim = SimDevice(adversary, raises=True)
    stream, read = AcceleratorStream(DEVICE, sim), []
    events = []
    for step in range(6):
        given = torch.tensor([step, step + 1])
        events.append(stream.launch(lambda given=given: read.append(stream.to_host(stream.to_device(given) * 10))))
        given.fill_(99)
    for step, event in enumerate(events):
        event.synchronize()
        assert read[step].tolist() == [10 * step, 10 * step + 10]


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_pinned_blocks_take_turns_and_are_never_written_before_they_were_read(adversary):
    """One step running, one being read: two blocks for outputs, and inputs that may be staged while a copy waits."""
    sim = SimDevice(adversary, raises=True)
    stream, in_flight, seen = AcceleratorStream(DEVICE, sim), [], []
    for step in range(20):
        read = []
        inputs = torch.full((3,), step)
        event = stream.launch(lambda: read.append(stream.to_host(stream.to_device(inputs) + 1)))  # noqa: B023
        in_flight.append((event, read))
        if len(in_flight) == 2:
            event, read = in_flight.pop(0)
            event.synchronize()
            seen.append(read[0].tolist())
            event.release()
    assert seen == [[step + 1] * 3 for step in range(19)]
    assert len(sim._pinned) <= 6


def test_an_error_in_the_work_belongs_to_its_event_and_later_work_runs():
    sim = SimDevice()
    stream = AcceleratorStream(DEVICE, sim)
    failed = stream.launch(lambda: 1 / 0)
    assert stream.call(lambda: 5) == 5
    assert failed.query()
    with pytest.raises(ZeroDivisionError):
        failed.synchronize()
    stream.close()
