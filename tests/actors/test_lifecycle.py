"""The life of a policy over Ray, in any order: sample, update in flight, pause, abort, continue, two actors.

Every trace passes the oracle of the in-process test. No pool is tight here and paused requests keep their slots, so
what was computed when follows from a trace's own version spans.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from rollout import RolloutClient, SamplingParams
from storage import Trace
from tests.rollout.lifecycle_oracle import Computed, LifecycleOracle
from tests.rollout.probes import prompts

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(600)]
PROMPTS = prompts(4, length=9)


class Call(threading.Thread):
    """One `client.sample` in the background."""

    def __init__(self, client: RolloutClient, **arguments: Any) -> None:
        super().__init__()
        self._client, self._arguments = client, arguments
        self.traces: list[Trace] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.traces = self._client.sample(**self._arguments)
        except BaseException as error:
            self.error = error


class Lifecycle(RuleBasedStateMachine):
    client: RolloutClient
    oracle: LifecycleOracle
    seen: Counter[str]

    @initialize()
    def begin(self) -> None:
        self.calls: list[tuple[Call, int]] = []
        self.done: list[Trace] = []
        self.paused = False
        self.submitted = 0

    @rule(first=st.integers(0, 3), samples=st.integers(1, 3), max_tokens=st.integers(1, 24), seed=st.integers(0, 5))
    def submit(self, first, samples, max_tokens, seed):
        params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=max_tokens, seed=seed, ignore_eos=True)
        arguments = {"prompts": PROMPTS[first:], "num_samples": samples, "sampling_params": params}
        self.submitted += samples * len(PROMPTS[first:])
        self.calls.append((Call(self.client, **arguments), 0))

    @precondition(lambda self: not self.paused)
    @rule(in_flight=st.sampled_from(["keep", "keep", "wait", "abort"]))
    def update_weights(self, in_flight):
        self.seen["version"] += 1
        version = self.seen["version"]
        self.client.update_weights(self.oracle.weights(version), version, in_flight=in_flight)

    @precondition(lambda self: not self.paused)
    @rule(mode=st.sampled_from(["keep", "wait", "abort"]))
    def pause(self, mode):
        self.client.pause(mode)
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self):
        self.client.resume()
        self.paused = False

    @rule()
    def abort(self):
        self.client.abort("all")

    @rule(which=st.integers(0, 30), more=st.integers(1, 8))
    def continue_a_trace(self, which, more):
        self.join()
        able = [t for t in self.done if t.finish_reason in ("abort", "length") and t.completion_ids]
        if not able:
            return
        trace = able[which % len(able)]
        params = SamplingParams(**{**trace.sampling_params, "max_tokens": len(trace.completion_ids) + more})
        (whole,) = self.client.sample(resume=[trace], sampling_params=params)
        assert whole.completion_ids[: len(trace.completion_ids)] == trace.completion_ids
        again = Computed(0, trace.route_len, self.seen["version"])  # under replay, with the weights of now
        later = [s for s in spans(whole) if s.end > trace.route_len]
        self.oracle.check(whole, trace.route_len, len(trace.completion_ids), [again, *later])
        self.seen["continued"] += 1

    def join(self) -> None:
        """Wait for what runs, and check it."""
        if self.paused:
            self.resume()
        for call, known in self.calls:
            call.join(timeout=120)
            assert not call.is_alive(), "a call hangs"
            assert call.error is None, call.error
            for trace in call.traces:
                assert trace.finish_reason != "error", trace.error
                if trace.completion_ids:
                    self.oracle.check(trace, known, known, spans(trace))
                self.seen[trace.finish_reason] += 1
                self.seen["several versions"] += len(trace.weight_versions) > 1
            self.done += call.traces
        self.calls.clear()

    def teardown(self) -> None:
        if hasattr(self, "calls"):
            self.join()
            assert len(self.done) == self.submitted, "every request comes to its end, once"


def spans(trace: Trace) -> list[Computed]:
    return [Computed(span.row_start, span.row_end, span.version) for span in trace.weight_versions]


def test_whatever_happens_over_ray_the_traces_are_exact(checkpoint) -> None:
    path, seen = checkpoint("qwen3_moe"), Counter[str]()
    options = {"num_actors": 2, "num_cpus": 0.5, "dtype": "float32", "max_running_requests": 6, "prefix_cache": True}
    with RolloutClient.ray(path, **options) as client:
        machine = type("Bound", (Lifecycle,), {"client": client, "oracle": LifecycleOracle(path), "seen": seen})
        limits = settings(
            max_examples=12,
            stateful_step_count=14,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        run_state_machine_as_test(machine, settings=limits)
    assert min(seen[what] for what in ("version", "continued", "abort", "length", "several versions")) > 0, seen
