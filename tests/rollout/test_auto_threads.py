"""Compute threads: measured, chosen, said, and the same results."""

from __future__ import annotations

import logging
import os

import pytest
import ray
import torch

from rollout import RolloutClient, SamplingParams
from rollout.auto_threads import Threads, candidates, fastest
from rollout.config import EngineOptions
from rollout.device import FEW_TOKENS, CpuStream


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({(1, 1): 1.0}, (1, 1)),
        ({(1, 1): 1.0, (2, 2): 0.95}, (1, 1)),
        ({(1, 1): 1.0, (2, 2): 0.9}, (2, 2)),
        ({(1, 1): 1.0, (2, 2): 3.0, (4, 4): 0.5}, (4, 4)),
        ({(1, 1): 1.0, (2, 2): 0.6, (4, 4): 0.58}, (2, 2)),
        ({(1, 1): 1.0, (2, 1): 0.8, (2, 2): 0.78}, (2, 2)),
        ({(1, 1): 1.0, (2, 1): 0.8, (2, 2): 0.81}, (2, 1)),
        ({(2, 1): 1.0, (2, 2): 1.1}, (2, 1)),
    ],
)
def test_more_threads_must_be_worth_it(seconds, chosen):
    assert fastest({Threads(*threads): took for threads, took in seconds.items()}) == chosen


def test_candidates_are_the_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert (candidates(), candidates(2)) == ([1, 2, 4], [1, 2])


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_the_choice_is_said_and_changes_no_token(checkpoint, caplog, monkeypatch, family):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    params = SamplingParams(max_tokens=5, temperature=0)
    found = []
    with caplog.at_level(logging.INFO, logger="rollout.auto_threads"):
        for threads in ("auto", 1):
            with RolloutClient.local(checkpoint(family), num_threads=threads, dtype="float32") as client:
                found.append(client.sample([[5, 6, 7]], sampling_params=params)[0].completion_ids)
    (line,) = caplog.messages
    assert "ms with 1, " in line
    assert "ms with 2 (torch 1), " in line
    assert "ms with 2; " in line
    assert list(found[0]) == list(found[1])


def test_the_stream_computes_with_them():
    stream = CpuStream(num_threads=1)

    def threads_for(tokens: int) -> int:
        stream.run(lambda: stream.begin_step(tokens))
        return stream.call(torch.get_num_threads)

    assert [threads_for(tokens) for tokens in (1, 1000)] == [1, 1]
    stream.set_num_threads(3, few=2)
    assert [threads_for(tokens) for tokens in (1, FEW_TOKENS, FEW_TOKENS + 1, 5)] == [2, 2, 3, 2]
    stream.close()


def test_a_given_number_is_measured_for_small_steps_only(checkpoint, caplog):
    with caplog.at_level(logging.INFO, logger="rollout.auto_threads"):
        with RolloutClient.local(checkpoint("qwen3_moe"), num_threads=2, dtype="float32"):
            pass
    (line,) = caplog.messages
    assert "ms with 2 (torch 1), " in line
    assert "ms with 1" not in line


def test_where_cores_are_shared_it_is_refused():
    with pytest.raises(ValueError, match="ranks of a group share the cores; with dp_size=2 give a number"):
        EngineOptions(num_threads="auto", dp_size=2)
    running = ray.is_initialized()
    with pytest.raises(ValueError, match="actors share a node's cores; give a number"):
        RolloutClient.ray("rollout/tiny_moe", num_actors=1, num_threads="auto")
    assert ray.is_initialized() is running  # refused before a cluster is started
