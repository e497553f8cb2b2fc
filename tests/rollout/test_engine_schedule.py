"""How the engine schedules: batching, overlap, streams, aborts and steps that fail."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time

import pytest
import torch

from rollout import RolloutClient, SamplingParams
from tests.rollout.oracle import Oracle, check_trace, mostly, tokens_agree

POISON = 95
modes = pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("olmoe")


@pytest.fixture(scope="module")
def oracle(path):
    return Oracle(path)


def greedy(max_tokens, **options):
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def prompts(count, length=5):
    return [[3 + (7 * i + 11 * j) % 90 for j in range(length)] for i in range(count)]


def parts_of(client):
    """The scheduler and the model of a local client."""
    built = client.backend._built
    return built.engine, built.engine._scheduler, built.runner.model


def check(oracle, traces):
    """Each delivered token, route and logprob is the oracle's; without an end token."""
    agreed = []
    for trace in traces:
        expected = oracle.greedy(trace.prompt_ids, len(trace.completion_ids), eos_token_id=None)
        agreed += [tokens_agree(oracle, trace.prompt_ids, trace.completion_ids, expected), check_trace(oracle, trace)]
    assert mostly(agreed)


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def assert_all_free(client, max_running_requests):
    engine, scheduler, _ = parts_of(client)
    wait_until(lambda: engine.idle)
    assert scheduler.slots.free_slots == scheduler.slots.size
    assert len(scheduler._rows) == max_running_requests


@contextlib.contextmanager
def before_forward(client, action):
    """Call `action(n)` on the device thread before the n-th forward from now."""
    number = itertools.count()
    handle = parts_of(client)[2].register_forward_pre_hook(lambda *_: action(next(number)))
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def device_held_at(client, forward):
    """The device stops before a forward until the yielded event is set."""
    release = threading.Event()
    with before_forward(client, lambda n: release.wait(60) if n == forward else None):
        try:
            yield release
        finally:
            release.set()


# --- batching


@modes
@pytest.mark.parametrize("max_batch_tokens", [128, 300, 2048])
def test_64_requests_of_32_tokens_share_their_forwards(path, max_batch_tokens, overlap_off):
    with RolloutClient.local(
        path, max_batch_tokens=max_batch_tokens, disable_overlap_schedule=overlap_off, max_running_requests=64
    ) as client:
        client.sample(prompts(64, length=20), sampling_params=greedy(32))
        stats = client.backend.stats
    assert stats.forwards <= 32 + math.ceil(64 * 20 / max_batch_tokens) + 4
    assert stats.tokens == 64 * (20 + 31)
    assert stats.sampled_tokens == 64 * 32


def test_no_step_is_larger_than_max_batch_tokens(path):
    with RolloutClient.local(path, max_batch_tokens=9) as client:
        client.sample(prompts(6, length=20), sampling_params=greedy(5))
        sizes = [event.tokens for event in client.backend.stats.events if event.kind == "launch"]
    assert max(sizes) == 9
    assert sum(sizes) == 6 * (20 + 4)


# --- overlap


def launched_before_finalized(stats):
    """For each step but the last: was the next one launched before it was finalized?"""
    when = {(event.kind, event.step): place for place, event in enumerate(stats.events)}
    return [when["launch", step + 1] < when["finalize", step] for step in range(stats.forwards - 1)]


@modes
def test_the_next_step_is_launched_before_this_one_is_finalized(path, overlap_off):
    with RolloutClient.local(path, max_running_requests=8, disable_overlap_schedule=overlap_off) as client:
        client.sample(prompts(16), sampling_params=greedy(60))
        stats = client.backend.stats
    ahead = launched_before_finalized(stats)
    assert len(ahead) >= 119
    assert sum(ahead) >= 0.95 * len(ahead) if not overlap_off else not any(ahead)
    seconds = [event.seconds for event in stats.events]
    assert seconds == sorted(seconds)


def test_the_host_launches_while_the_device_is_still_busy(path):
    """The event log alone could be written late: hold the device in step 5 and see step 6 launched."""
    with RolloutClient.local(path) as client, device_held_at(client, 5) as release:
        stats = client.backend.stats
        stream = client.stream(prompts(3), sampling_params=greedy(20))
        consumer = threading.Thread(target=list, args=(stream,))
        consumer.start()
        wait_until(lambda: stats.forwards == 7)
        assert {event.step for event in stats.events if event.kind == "finalize"} == set(range(5))
        release.set()
        consumer.join()


@modes
def test_a_length_finish_drops_no_token(path, overlap_off):
    lengths = [1, 2, 7, 20, 33]
    with RolloutClient.local(path, disable_overlap_schedule=overlap_off) as client:
        client.sample(prompts(5), sampling_params=[greedy(length) for length in lengths])
        stats = client.backend.stats
    assert stats.dropped_tokens == 0
    assert stats.tokens == 5 * 5 + sum(length - 1 for length in lengths)


@modes
def test_a_stop_drops_at_most_the_token_in_flight(path, overlap_off, oracle):
    params = [greedy(30, stop_token_ids=(oracle.greedy(p, 5, eos_token_id=None)[4],)) for p in prompts(6)]
    with RolloutClient.local(path, disable_overlap_schedule=overlap_off) as client:
        traces = client.sample(prompts(6), sampling_params=params)
        stats = client.backend.stats
    stopped = [trace for trace in traces if trace.finish_reason == "stop"]
    assert len(stopped) == 6
    assert stats.dropped_tokens == (0 if overlap_off else 6)
    assert stats.sampled_tokens == sum(len(trace.completion_ids) for trace in traces)
    check(oracle, traces)


# --- streams


@modes
def test_the_first_trace_arrives_before_the_last_token_is_sampled(path, overlap_off, oracle):
    with RolloutClient.local(path, disable_overlap_schedule=overlap_off) as client, device_held_at(client, 6) as release:
        stream = client.stream(prompts(2), sampling_params=[greedy(1), greedy(40)])
        first = next(stream)
        assert len(first.completion_ids) == 1
        assert client.backend.stats.sampled_tokens <= 1 + 6
        release.set()
        (last,) = stream
    check(oracle, [first, last])


@modes
def test_leaving_a_stream_aborts_it_and_frees_everything(path, overlap_off, oracle):
    options = {"max_running_requests": 3, "disable_overlap_schedule": overlap_off}
    with RolloutClient.local(path, **options) as client:
        with device_held_at(client, 6) as release:
            stream = client.stream(prompts(8), sampling_params=[greedy(1), *[greedy(100)] * 7])
            next(stream)
            stream.close()
            release.set()
        assert_all_free(client, 3)
        assert client.backend.stats.sampled_tokens < 100
        check(oracle, client.sample(prompts(5), sampling_params=greedy(8)))


@modes
def test_an_aborted_request_keeps_what_was_delivered(path, overlap_off, oracle):
    """k delivered tokens have P + k - 1 rows; a request that still waits has none; the others go on."""
    options = {"max_running_requests": 3, "disable_overlap_schedule": overlap_off}
    with RolloutClient.local(path, **options) as client:
        with device_held_at(client, 8) as release:
            stream = client.stream(prompts(4), sampling_params=[greedy(1), greedy(50), greedy(50), greedy(50)], step=0)
            first = next(stream)
            running = {request.request.sample_id: request for request in parts_of(client)[1].requests()}
            client.backend.abort(["run/0/0-1/0"])
            release.set()
        traces = {trace.sample_id: trace for trace in stream}
        assert_all_free(client, 3)
    assert len(running) == 3
    aborted = traces.pop("run/0/0-1/0")
    assert aborted.finish_reason == "abort"
    assert 1 <= len(aborted.completion_ids) < 50
    assert [len(trace.completion_ids) for trace in traces.values()] == [50, 50]
    check(oracle, [first, aborted, *traces.values()])


def test_aborting_a_waiting_request_leaves_no_routes(path):
    with RolloutClient.local(path, max_running_requests=1) as client:
        with device_held_at(client, 3) as release:
            stream = client.stream(prompts(2), sampling_params=greedy(20), step=0)
            consumer: list = []
            thread = threading.Thread(target=lambda: consumer.extend(stream))
            thread.start()
            wait_until(lambda: client.backend.stats.forwards >= 3)
            client.backend.abort(["run/0/0-1/0"])
            release.set()
            thread.join()
        assert_all_free(client, 1)
    aborted, finished = consumer
    assert (aborted.finish_reason, aborted.completion_ids, aborted.routed_experts) == ("abort", [], None)
    assert (finished.finish_reason, len(finished.completion_ids)) == ("length", 20)


def test_a_paused_consumer_bounds_what_is_generated(path):
    """A stream submits at most `window` requests ahead of its consumer."""
    with RolloutClient.local(path, max_running_requests=2) as client:
        window = client.backend.window
        stream = client.stream(prompts(20), sampling_params=greedy(6))
        next(stream)
        engine = parts_of(client)[0]
        wait_until(lambda: engine.idle)
        assert client.backend.stats.sampled_tokens == window * 6
        assert len(list(stream)) == 19
        assert client.backend.stats.sampled_tokens == 20 * 6


def test_two_threads_sample_at_once(path, oracle):
    found: dict[int, list] = {}
    start = threading.Barrier(2)

    def run(client, which):
        start.wait()
        found[which] = client.sample(prompts(12)[which::2], sampling_params=greedy(24))

    with RolloutClient.local(path, max_running_requests=5) as client:
        threads = [threading.Thread(target=run, args=(client, which)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_all_free(client, 5)
    for which in (0, 1):
        assert [trace.prompt_ids for trace in found[which]] == prompts(12)[which::2]
        check(oracle, found[which])


# --- failures


def fail_at(forward):
    def action(n):
        if n == forward:
            raise RuntimeError("injected failure")

    return action


@modes
@pytest.mark.parametrize("forward", [0, 3])
def test_a_failed_step_ends_only_its_own_requests(path, forward, overlap_off, oracle):
    """Two of four requests run when the step fails; they keep what was delivered before, the next two are untouched."""
    options = {"max_running_requests": 2, "disable_overlap_schedule": overlap_off}
    with RolloutClient.local(path, **options) as client:
        with before_forward(client, fail_at(forward)):
            traces = client.sample(prompts(4), sampling_params=greedy(10))
        again = client.sample(prompts(4), sampling_params=greedy(10))
        assert_all_free(client, 2)
    assert [trace.finish_reason for trace in traces] == ["error", "error", "length", "length"]
    for trace in traces[:2]:
        assert "injected failure" in trace.error
        assert len(trace.completion_ids) == forward
    check(oracle, [*(traces if forward else traces[2:]), *again])


@contextlib.contextmanager
def poisoned(client):
    """Every request with the token POISON computes NaN from its first layer on."""

    def hook(_module, args, output):
        output[args[0] == POISON] = torch.nan

    handle = parts_of(client)[2].get_input_embeddings().register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@modes
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["default", "invariant"])
def test_nan_logits_do_not_harm_the_neighbours(path, batch_invariant, overlap_off, oracle):
    """Neither those in the same batch nor those that later take over the slots with NaN keys and values."""
    healthy = prompts(7)
    asked = [healthy[0], [5, POISON, 6], *healthy[1:]]
    options = {"max_running_requests": 4, "disable_overlap_schedule": overlap_off, "batch_invariant": batch_invariant}
    with RolloutClient.local(path, **options) as client, poisoned(client):
        traces = client.sample(asked, sampling_params=greedy(12))
        again = client.sample(healthy, sampling_params=greedy(12))
        assert_all_free(client, 4)
    victim = traces.pop(1)
    assert (victim.finish_reason, victim.completion_ids, victim.routed_experts) == ("error", [], None)
    assert "not finite" in victim.error
    assert [trace.finish_reason for trace in traces + again] == ["length"] * 14
    check(oracle, traces + again)
