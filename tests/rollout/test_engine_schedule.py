"""How the engine schedules: requests share forwards, the next step is launched early, nothing is computed in vain."""

from __future__ import annotations

import math
import threading

import pytest

from rollout import RolloutClient
from tests.rollout.oracle import Oracle, check_greedy
from tests.rollout.probes import device_held_at, greedy, prompts, wait_until

modes = pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("olmoe")


@pytest.fixture(scope="module")
def oracle(path):
    return Oracle(path)


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
    check_greedy(oracle, traces)
