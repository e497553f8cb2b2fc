"""Streams, aborts and failures: each request ends on its own, and the engine goes on."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch

from rollout import RolloutClient
from tests.rollout.oracle import Oracle, check_greedy
from tests.rollout.probes import assert_all_free, before_forward, device_held_at, greedy, parts_of, prompts, wait_until

POISON = 95
modes = pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("olmoe")


@pytest.fixture(scope="module")
def oracle(path):
    return Oracle(path)


@modes
def test_the_first_trace_arrives_before_the_last_token_is_sampled(path, overlap_off, oracle):
    with (
        RolloutClient.local(path, disable_overlap_schedule=overlap_off) as client,
        device_held_at(client, 6) as release,
    ):
        stream = client.stream(prompts(2), sampling_params=[greedy(1), greedy(40)])
        first = next(stream)
        assert len(first.completion_ids) == 1
        assert client.backend.stats.sampled_tokens <= 1 + 6
        release.set()
        (last,) = stream
    assert (last.finish_reason, len(last.completion_ids)) == ("length", 40)
    check_greedy(oracle, [first, last])


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
        check_greedy(oracle, client.sample(prompts(5), sampling_params=greedy(8)))


@modes
def test_an_aborted_request_keeps_what_was_delivered(path, overlap_off, oracle):
    """k delivered tokens have P + k - 1 rows; a request that still waits has none; the others go on."""
    options = {"max_running_requests": 3, "disable_overlap_schedule": overlap_off}
    with RolloutClient.local(path, **options) as client:
        with device_held_at(client, 8) as release:
            stream = client.stream(prompts(4), sampling_params=[greedy(1), greedy(50), greedy(50), greedy(50)], step=0)
            first = next(stream)
            running = {request.request.sample_id: request for request in parts_of(client)[1].requests()}
            client.abort(["run/0/0-1/0"])
            release.set()
        traces = {trace.sample_id: trace for trace in stream}
        assert_all_free(client, 3)
    assert len(running) == 3
    aborted = traces.pop("run/0/0-1/0")
    assert aborted.finish_reason == "abort"
    assert 1 <= len(aborted.completion_ids) < 50
    assert [len(trace.completion_ids) for trace in traces.values()] == [50, 50]
    check_greedy(oracle, [first, aborted, *traces.values()])


def test_aborting_a_waiting_request_leaves_no_routes(path):
    with RolloutClient.local(path, max_running_requests=1) as client:
        with device_held_at(client, 3) as release:
            stream = client.stream(prompts(2), sampling_params=greedy(20), step=0)
            consumer: list = []
            thread = threading.Thread(target=lambda: consumer.extend(stream))
            thread.start()
            wait_until(lambda: client.backend.stats.forwards >= 3)
            client.backend.abort_requests(
                [r for r in parts_of(client)[1].requests() if r.request.sample_id == "run/0/0-1/0"]
            )
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
        check_greedy(oracle, found[which])


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
    check_greedy(oracle, [*(traces if forward else traces[2:]), *again])


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
    """Neither those in the same batch nor shorter ones that later take over the slots with NaN keys and values."""
    healthy = [prompt[: 5 + 4 * (at % 3)] for at, prompt in enumerate(prompts(7, length=13))]
    asked = [healthy[0], [5, POISON, *range(6, 36)], *healthy[1:]]
    options = {"max_running_requests": 4, "disable_overlap_schedule": overlap_off, "batch_invariant": batch_invariant}
    with RolloutClient.local(path, **options) as client, poisoned(client):
        traces = client.sample(asked, sampling_params=greedy(12))
        again = client.sample(healthy, sampling_params=greedy(12))
        assert_all_free(client, 4)
    victim = traces.pop(1)
    assert (victim.finish_reason, victim.completion_ids, victim.routed_experts) == ("error", [], None)
    assert "not finite" in victim.error
    assert [trace.finish_reason for trace in traces + again] == ["length"] * 14
    check_greedy(oracle, traces + again)


def test_nan_in_the_slots_between_two_neighbours(path, oracle):
    """Three decodes in evenly spaced slots share one attention call; the one in the middle holds NaN."""
    asked = [prompts(1, length=9)[0], [POISON] * 9, prompts(1, length=23)[0]]
    with RolloutClient.local(path) as client, poisoned(client):
        first, victim, last = client.sample(asked, sampling_params=greedy(4))
    assert victim.finish_reason == "error"
    assert (first.finish_reason, last.finish_reason) == ("length", "length")
    check_greedy(oracle, [first, last])


@modes
def test_nan_logits_in_mid_sequence_keep_what_was_delivered(path, overlap_off, oracle):
    """The first request gets NaN logits in forward 4: its four tokens stay, with P + 4 - 1 rows."""
    number = itertools.count()

    def hook(_module, _args, output):
        if next(number) == 4:
            output.logits[0, 0] = torch.nan

    with RolloutClient.local(path, disable_overlap_schedule=overlap_off) as client:
        parts_of(client)[2].register_forward_hook(hook)
        traces = client.sample(prompts(3), sampling_params=greedy(10))
    assert [trace.finish_reason for trace in traces] == ["error", "length", "length"]
    assert [len(trace.completion_ids) for trace in traces] == [4, 10, 10]
    check_greedy(oracle, traces)
