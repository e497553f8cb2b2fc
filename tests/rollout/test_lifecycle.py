"""Everything that can happen to requests, in any order: whatever comes out passes an oracle that knows what happened.

hypothesis drives the engine step by step: submit, abort, preempt, pause, go on, continue a trace, take another turn,
update the weights with kept or recomputed keys and values; the pool is tight and prefixes are cached.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollout.backend import SampleRequest, Start
from rollout.build import build_engine
from rollout.config import EngineOptions
from rollout.sampling import SamplingParams
from rollout.traces import trace_of
from storage.trace import Trace
from tests.rollout.lifecycle_oracle import Computed, LifecycleOracle
from tests.rollout.probes import prompts

COMMON = prompts(1, length=18)[0]
KV_TOKENS = 90
MAX_RUNNING = 3


class Engines:
    """One engine per option set, and one oracle, for all examples; versions go up from example to example."""

    def __init__(self, path: Any) -> None:
        self.path = path
        self.oracle = LifecycleOracle(path)
        self._built: dict[tuple[bool, bool], Any] = {}
        self.finished: list[Any] = []

    def get(self, overlap: bool, prefix_cache: bool) -> Any:
        if (overlap, prefix_cache) not in self._built:
            options = EngineOptions(
                kv_tokens=KV_TOKENS,
                max_running_requests=MAX_RUNNING,
                max_batch_tokens=24,
                disable_overlap_schedule=not overlap,
                prefix_cache=prefix_cache,
            )
            self._built[overlap, prefix_cache] = build_engine(
                str(self.path), options, lambda r: self.finished.append(r)
            )
        return self._built[overlap, prefix_cache]

    def close(self) -> None:
        for built in self._built.values():
            built.close()


class Lifecycle(RuleBasedStateMachine):
    engines: Engines

    @initialize(overlap=st.booleans(), prefix_cache=st.booleans())
    def begin(self, overlap, prefix_cache):
        self.built = self.engines.get(overlap, prefix_cache)
        self.engine, self.scheduler = self.built.engine, self.built.engine._scheduler
        self.log: dict[Any, list[Computed]] = defaultdict(list)
        self.began: dict[Any, tuple[int, int]] = {}
        self.traces: list[Trace] = []
        self.paused = False
        self.count = 0
        self.engines.finished.clear()
        launch = type(self.built.runner).launch

        def logged(step, batch, shape):
            for work in batch:
                done = Computed(work.start, work.start + work.length, self.engine.weight_version)
                self.log[work.request].append(done)
            return launch(self.built.runner, step, batch, shape)

        self.built.runner.launch = logged

    def submit_request(self, prompt, params, start=None, **options):
        self.count += 1
        request = SampleRequest(f"run/0/{self.count}/0", 0, tuple(prompt), params, start=start, **options)
        entry = self.engine.new_request(request)
        rows, tokens = (len(start.routed_experts), len(start.completion_ids)) if start is not None else (0, 0)
        self.began[entry] = rows, tokens
        self.engine.add(entry)

    @rule(length=st.integers(1, 18), tail=st.integers(3, 5), max_tokens=st.integers(0, 12), seed=st.integers(0, 3))
    def submit(self, length, tail, max_tokens, seed):
        params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=max_tokens, seed=seed)
        self.submit_request([*COMMON[:length], tail], params)

    @rule(samples=st.integers(2, 4))
    def submit_group(self, samples):
        for seed in range(samples):
            self.submit_request(COMMON, SamplingParams(max_tokens=8, seed=seed, ignore_eos=True))

    @rule(count=st.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            if not self.engine.resting:
                self.engine.step()

    @precondition(lambda self: not self.scheduler.idle)
    @rule(which=st.integers(0, 20))
    def abort(self, which):
        live = list(self.scheduler.requests())
        self.engine.abort([live[which % len(live)]])

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 20))
    def preempt(self, which):
        self.scheduler.preempt(self.scheduler.running[which % len(self.scheduler.running)])

    @precondition(lambda self: not self.paused)
    @rule(mode=st.sampled_from(["keep", "wait", "abort", "yield"]))
    def pause(self, mode):
        self.engine.pause(mode)
        self.paused = True

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self):
        self.engine.resume()
        self.paused = False

    @rule(which=st.integers(0, 20), more=st.integers(1, 8))
    def continue_trace(self, which, more):
        self.collect()
        able = [
            t for t in self.traces if t.finish_reason in ("abort", "length") and t.completion_ids and not t.route_start
        ]
        if not able:
            return
        trace = able[which % len(able)]
        params = {**trace.sampling_params, "max_tokens": min(len(trace.completion_ids) + more, 40), "min_tokens": 0}
        if params["max_tokens"] > len(trace.completion_ids):
            start = Start(
                trace.routed_experts,
                tuple(trace.weight_versions),
                tuple(trace.completion_ids),
                tuple(trace.logprobs.tolist()),
                tuple(trace.raw_logprobs.tolist()),
            )
            self.submit_request(trace.prompt_ids, SamplingParams(**params), start, stream_id=trace.sample_id)

    @rule(which=st.integers(0, 20))
    def take_a_turn(self, which):
        self.collect()
        able = [t for t in self.traces if t.completion_ids and not t.route_start and len(t.token_ids) < 40]
        if able:
            trace = able[which % len(able)]
            start = Start(trace.routed_experts, tuple(trace.weight_versions))
            self.submit_request([*trace.token_ids, 7, 8], SamplingParams(max_tokens=6, seed=1, ignore_eos=True), start)

    @rule(recompute=st.booleans())
    def update_weights(self, recompute):
        version = self.engine.weight_version + 1
        staged = self.built.stage_weights(self.engines.oracle.weights(version), version, False, False)
        self.built.apply_weights(staged, version, recompute)

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def collect(self):
        while self.engines.finished:
            request = self.engines.finished.pop()
            trace = trace_of(request, None)
            assert trace.finish_reason != "error", trace.error
            self.engines.oracle.check(trace, *self.began[request], self.log[request])
            self.traces.append(trace)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.engine.resume()
        while not self.engine.idle:
            self.engine.step()
        del self.built.runner.launch
        self.collect()
        assert len(self.traces) == self.count, "every request comes to its end, once"
        self.engine.weight_version += 1
        staged = self.built.stage_weights(
            self.engines.oracle.weights(self.engine.weight_version + 1), self.engine.weight_version + 1, False, False
        )
        self.built.apply_weights(staged, self.engine.weight_version + 1)
        assert self.scheduler.slots.free_slots == KV_TOKENS, "without prefixes, every slot is free"


@pytest.fixture(scope="module")
def engines(checkpoint):
    engines = Engines(checkpoint("qwen3_moe"))
    yield engines
    engines.close()


def run(engines, examples, steps, derandomize):
    machine = type("Bound", (Lifecycle,), {"engines": engines})
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)


def test_whatever_happens_the_traces_are_exact(engines):
    run(engines, examples=12, steps=30, derandomize=True)


@pytest.mark.full
def test_whatever_happens_for_longer(engines):
    run(engines, examples=150, steps=40, derandomize=False)
