"""Pausing, going on, and ending single samples: partial traces are whole up to where they end, and nothing leaks."""

from __future__ import annotations

import threading

import pytest

from rollout import RolloutClient, SamplingParams
from tests.rollout.oracle import Oracle, check_greedy
from tests.rollout.probes import assert_all_free, before_forward, device_held_at, greedy, parts_of, prompts, wait_until

SAMPLED = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, seed=3)
modes = pytest.mark.parametrize("overlap_off", [False, True], ids=["overlap", "normal"])


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("olmoe")


@pytest.fixture(scope="module")
def undisturbed(path):
    with RolloutClient.local(path, batch_invariant=True) as client:
        return client.sample(prompts(4), sampling_params=SAMPLED, step=0)


class Sampling(threading.Thread):
    """One call in a thread of its own."""

    def __init__(self, client, *args, **options) -> None:
        super().__init__()
        self.traces: list = []
        self._call = lambda: self.traces.extend(client.sample(*args, **options))
        self.start()

    def run(self) -> None:
        self._call()


def bits(trace):
    return trace.token_ids, trace.raw_logprobs.tobytes(), trace.routed_experts.tolist()


@modes
@pytest.mark.parametrize("mode", ["keep", "yield"])
def test_what_ran_goes_on_as_if_nothing_had_been(path, mode, overlap_off, undisturbed):
    options = {"max_running_requests": 2, "disable_overlap_schedule": overlap_off, "batch_invariant": True}
    with RolloutClient.local(path, **options) as client:
        sampling = Sampling(client, prompts(4), sampling_params=SAMPLED, step=0)
        wait_until(lambda: client.backend.stats.forwards > 8)
        client.pause(mode)
        forwards, engine = client.backend.stats.forwards, parts_of(client)[0]
        assert engine.resting
        later = Sampling(client, prompts(1), sampling_params=greedy(3), step=1)
        later.join(0.05)
        assert (client.backend.stats.forwards, later.is_alive()) == (forwards, True), "nothing runs while paused"
        parts_of(client)[1].check()
        client.resume()
        sampling.join()
        later.join()
        assert (parts_of(client)[1].preemptions > 0) == (mode == "yield")
        assert_all_free(client, 2)
    assert [bits(trace) for trace in sampling.traces] == [bits(trace) for trace in undisturbed]


@modes
def test_wait_ends_what_has_begun_and_begins_nothing(path, overlap_off):
    with RolloutClient.local(path, max_running_requests=2, disable_overlap_schedule=overlap_off) as client:
        sampling = Sampling(client, prompts(4), sampling_params=greedy(30), step=0)
        wait_until(lambda: client.backend.stats.forwards > 3)
        client.pause("wait")
        assert client.backend.stats.sampled_tokens == 2 * 30
        client.resume()
        sampling.join()
        assert [len(trace.completion_ids) for trace in sampling.traces] == [30] * 4


@modes
def test_abort_ends_everything_with_what_it_has(path, overlap_off):
    oracle = Oracle(path)
    with RolloutClient.local(path, max_running_requests=2, disable_overlap_schedule=overlap_off) as client:
        sampling = Sampling(client, prompts(9), sampling_params=greedy(100), step=0)
        wait_until(lambda: client.backend.stats.forwards > 8)
        client.pause("abort")
        assert_all_free(client, 2)
        client.resume()
        sampling.join()
        assert client.backend.stats.sampled_tokens < 900
    partial = [trace for trace in sampling.traces if trace.completion_ids]
    assert len(partial) >= 2
    assert all(trace.route_len == 5 + len(trace.completion_ids) - 1 for trace in partial)
    assert all(trace.routed_experts is None for trace in sampling.traces if not trace.completion_ids)
    check_greedy(oracle, partial)


def test_single_samples_end_wherever_they_are(path):
    """One runs, one waits for a row, one was not even submitted."""
    ends = ["run/0/0-0/0", "run/0/0-2/0", "run/0/0-8/0"]
    with RolloutClient.local(path, max_running_requests=2) as client:
        with device_held_at(client, 6) as release:
            sampling = Sampling(client, prompts(9), sampling_params=greedy(12), step=0)
            wait_until(lambda: client.backend.stats.forwards >= 7)
            client.abort(ends)
            release.set()
        sampling.join()
        assert_all_free(client, 2)
    aborted = {trace.sample_id: trace for trace in sampling.traces if trace.finish_reason == "abort"}
    assert sorted(aborted) == ends
    assert len(aborted[ends[0]].routed_experts) == 5 + len(aborted[ends[0]].completion_ids) - 1
    assert [aborted[sample_id].completion_ids for sample_id in ends[1:]] == [[], []]
    assert {len(t.completion_ids) for t in sampling.traces if t.finish_reason == "length"} == {12}


def test_a_request_that_yielded_can_be_aborted_and_keeps_its_rows(path):
    with RolloutClient.local(path, max_running_requests=2) as client:
        sampling = Sampling(client, prompts(2), sampling_params=greedy(60), step=0)
        wait_until(lambda: client.backend.stats.forwards > 8)
        client.pause("yield")
        client.abort("all")
        client.resume()
        sampling.join()
        assert_all_free(client, 2)
    assert {trace.finish_reason for trace in sampling.traces} == {"abort"}
    assert all(len(t.routed_experts) == 5 + len(t.completion_ids) - 1 >= 8 for t in sampling.traces)
    check_greedy(Oracle(path), sampling.traces)


def test_bad_input_names_what_is_wrong_and_harms_nothing(path):
    with RolloutClient.local(path) as client:
        with pytest.raises(ValueError, match=r"abort of \['run/7/0-0/0'\]: no such samples wait or run"):
            client.abort(["run/7/0-0/0"])
        with pytest.raises(ValueError, match=r"abort\('run/0/0-0/0'\): pass a list of sample ids, or 'all'"):
            client.abort("run/0/0-0/0")
        with pytest.raises(ValueError, match=r"pause mode 'now', need one of \('keep', 'wait', 'abort', 'yield'\)"):
            client.pause("now")
        client.abort("all")
        (trace,) = client.sample(prompts(1), sampling_params=greedy(3))
        with pytest.raises(ValueError, match="they may have ended; none was aborted"):
            client.abort([trace.sample_id])
    with pytest.raises(RuntimeError, match="this client is closed"):
        client.pause()


def test_closing_a_paused_client_ends_its_calls(path):
    client = RolloutClient.local(path, max_running_requests=2)
    client.pause()
    backend = client.backend
    stream = backend.stream([])
    assert list(stream) == []
    client.close()


def test_a_slot_that_leaks_stops_the_engine_by_name(path):
    """The check runs whenever the engine comes to rest."""
    with RolloutClient.local(path) as client:
        scheduler = parts_of(client)[1]
        with before_forward(client, lambda n: scheduler.slots.allocate(4) if n == 1 else None):
            with pytest.raises(RuntimeError, match="leaked"):
                client.sample(prompts(1), sampling_params=greedy(6))
                client.sample(prompts(1), sampling_params=greedy(6))
