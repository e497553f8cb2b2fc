"""client.stats(): counts that follow from prompts and lengths, states of a paused engine, commits, and who is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout import RolloutClient, SamplingParams
from rollout.figures import CLIENT, ENGINE, Figures, merge
from rollout.tiny_moe import MODEL_PATH
from storage import TraceDataset

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
LENGTH = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
TOLD = ("commit_seconds", "last_step")


@pytest.fixture(scope="module")
def client() -> Iterator[RolloutClient]:
    with RolloutClient.local(MODEL_PATH, dtype="float32", max_running_requests=2) as client:
        yield client


def grown(client: RolloutClient, before: Figures) -> Figures:
    return {name: value - before.get(name, 0) for name, value in client.stats().items() if name.endswith("_total")}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_counts_are_those_of_prompts_and_lengths(client: RolloutClient) -> None:
    before, begun = client.stats(), time.perf_counter()
    client.sample(PROMPTS, num_samples=2, sampling_params=LENGTH)
    wall, counted = time.perf_counter() - begun, grown(client, before)
    assert counted["requests_ended_total"] == 6
    assert counted["tokens_sampled_total"] == 6 * 5
    assert counted["tokens_computed_total"] == 2 * (3 + 2 + 4) + 6 * (5 - 1)  # the last token is never an input
    assert counted["missing_route_rows_total"] == counted["tokens_dropped_total"] == counted["preemptions_total"] == 0
    assert counted["steps_total"] >= 3 * 5  # two at a time
    assert 0 < counted["finalize_seconds_total"] < counted["step_seconds_total"] < wall
    assert 0 < counted["deliver_seconds_total"] < wall
    assert 0 < counted["capture_seconds_total"] < counted["step_seconds_total"]
    assert counted["wait_seconds_total"] + counted["finalize_seconds_total"] < wall
    assert counted["commits_total"] == counted["commit_seconds_total"] == counted["encode_seconds_total"] == 0


def test_a_paused_engine_says_who_runs_waits_and_holds_slots(client: RolloutClient) -> None:
    before = client.stats()
    assert (before["requests_running"], before["requests_waiting"], before["kv_slots_used"]) == (0, 0, 0)
    long = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
    thread = threading.Thread(target=client.sample, args=(PROMPTS,), kwargs={"sampling_params": long})
    thread.start()
    wait_until(lambda: grown(client, before)["tokens_sampled_total"] > 4)
    client.pause()
    paused = client.stats()
    client.resume()
    thread.join()
    assert (paused["requests_running"], paused["requests_waiting"]) == (2, 1)
    assert paused["kv_slots_used"] == 2 * 64  # of their longest sequences, 42 and 41 inputs, as powers of two
    assert paused["kv_used_ratio"] == 128 / paused["kv_slots"]
    after = client.stats()
    assert (after["requests_running"], after["requests_waiting"], after["kv_slots_used"]) == (0, 0, 0)


def test_every_name_is_listed_and_every_listed_name_is_there(client: RolloutClient) -> None:
    client.sample([[3]], sampling_params=LENGTH)
    names = {figure.name for figure in (*ENGINE, *CLIENT)}
    assert names == client.stats().keys() | {"commit_seconds"}  # of a commit, and this client records nothing
    assert all(isinstance(value, int | float) for value in client.stats().values())


def test_the_weight_version_is_the_one_that_samples(client: RolloutClient) -> None:
    client.update_weights(MODEL_PATH, version=4)
    assert client.stats()["weight_version"] == 4


def test_commits_are_timed_and_on_stats_is_told_behind_each_step(tmp_path: Path) -> None:
    told: list[Figures] = []
    committed: list[list[int]] = []

    def on_stats(figures: Figures) -> None:
        told.append(figures)
        committed.append(TraceDataset(tmp_path).steps)

    options = {"dtype": "float32", "enable_return_routed_experts": False, "traces": tmp_path, "on_stats": on_stats}
    with RolloutClient.local(MODEL_PATH, **options) as client:
        assert not set(TOLD) & client.stats().keys()
        client.sample(PROMPTS, sampling_params=LENGTH)
        with client.step(7):
            client.sample([[3]], sampling_params=LENGTH)
            client.sample([[4]], sampling_params=LENGTH)
        with client.step(9):
            pass
        assert client.stats() == told[-1]
        seconds = [figures["commit_seconds"] for figures in told]
        missing = [figures["missing_route_rows_total"] for figures in told]
    assert [figures["last_step"] for figures in told] == [0, 7]
    assert [figures["commits_total"] for figures in told] == [1, 2]
    assert committed == [[0], [0, 7]]
    assert told[1]["encode_seconds_total"] > 0
    assert told[1]["commit_seconds_total"] == pytest.approx(sum(seconds))
    assert missing == [9 + 3 * 4, 9 + 3 * 4 + 2 * 5]  # no routes are recorded: all rows, prompt + 4


def test_an_error_of_on_stats_reaches_the_caller_and_the_step_stays(tmp_path: Path) -> None:
    def broken(figures: Figures) -> None:
        raise OSError("the logger's disk is full")

    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=tmp_path, on_stats=broken) as client:
        with pytest.raises(OSError, match="the logger's disk is full"):
            client.sample([[3]], sampling_params=LENGTH)
        assert client.stats()["last_step"] == 0
    assert (TraceDataset(tmp_path).steps, TraceDataset(tmp_path).verify()) == ([0], [])


def test_merged_figures_are_sums_but_for_ratio_and_version() -> None:
    one = {"engines": 1, "steps_total": 4, "kv_slots": 10, "kv_slots_used": 5, "kv_used_ratio": 0.5}
    other = {"engines": 1, "steps_total": 6, "kv_slots": 30, "kv_slots_used": 5, "kv_used_ratio": 1 / 6}
    merged = merge([one | {"weight_version": 3}, other | {"weight_version": 2}])
    expected = {"engines": 2, "steps_total": 10, "kv_slots": 40, "kv_slots_used": 10, "kv_used_ratio": 0.25}
    assert merged == expected | {"weight_version": 2}
    assert merge([]) == {}
