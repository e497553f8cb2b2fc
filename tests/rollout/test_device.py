"""The device on a CPU: one thread, first in, first out; an error belongs to the event of its own work."""

import threading
import time

import pytest
import torch

from rollout.device import CpuStream, Event, open_stream
from tests.rollout.threads import no_thread_left


@pytest.fixture
def stream():
    stream = CpuStream(num_threads=1)
    yield stream
    stream.close()


def test_work_runs_in_the_order_of_its_launch(stream):
    seen = []
    events = [stream.launch(lambda i=i: seen.append(i)) for i in range(200)]
    events[-1].synchronize()
    assert seen == list(range(200))
    assert all(event.query() for event in events)


def test_launch_returns_before_the_work_runs(stream):
    gate = threading.Event()
    event = stream.launch(gate.wait)
    assert not event.query()
    gate.set()
    event.synchronize()
    assert event.query()


def test_an_event_is_done_when_all_work_before_it_is(stream):
    gate, seen = threading.Event(), []
    stream.launch(gate.wait)
    second = stream.launch(lambda: seen.append("second"))
    time.sleep(0.01)
    assert not second.query()
    assert not seen
    gate.set()
    second.synchronize()
    assert seen == ["second"]


def test_an_error_stays_with_its_event_and_later_work_runs(stream):
    def fail():
        raise ValueError("kernel 7 failed")

    failed, after = stream.launch(fail), stream.launch(lambda: None)
    after.synchronize()
    assert failed.query()
    for _ in range(2):
        with pytest.raises(ValueError, match="kernel 7 failed"):
            failed.synchronize()


def test_run_waits_and_raises(stream):
    seen = []
    stream.run(lambda: seen.append(threading.current_thread().name))
    assert seen == ["moe-rollout-device"]
    with pytest.raises(ZeroDivisionError):
        stream.run(lambda: 1 / 0)


def test_the_caller_may_bring_the_event(stream):
    event = Event()
    assert stream.launch(lambda: None, event) is event
    event.synchronize()


def test_work_runs_in_inference_mode_with_its_own_number_of_threads(stream):
    facts = {}

    def look():
        facts.update(inference=torch.is_inference_mode_enabled(), threads=torch.get_num_threads())

    stream.run(look)
    assert facts == {"inference": True, "threads": 1}
    assert not torch.is_inference_mode_enabled()


def test_close_finishes_what_was_launched_and_stops_the_thread():
    with no_thread_left():
        stream = CpuStream(num_threads=1)
        events = [stream.launch(lambda: time.sleep(0.002)) for _ in range(20)]
        stream.close()
    assert all(event.query() for event in events)


def test_a_device_that_the_engine_cannot_drive_is_refused_with_the_one_it_can():
    for device in ("tpu", "cuda:x", ""):
        with pytest.raises(ValueError, match=rf"device '{device}' is not supported .* device='cpu'"):
            open_stream(device, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:9"])
def test_cuda_is_refused_where_torch_has_none(device):
    with pytest.raises(ValueError, match=rf"device '{device}': the installed torch .* device='cpu'"):
        open_stream(device, 1)


def test_a_gpu_that_does_not_exist_is_refused_with_the_last_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"'cuda:9' does not exist: this machine has 2, the last is 'cuda:1'"):
        open_stream("cuda:9", 1)
