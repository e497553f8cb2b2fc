"""Faults of recorded steps that would give wrong or lost rows: the check of replays sees each of them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rollout.attention_plan import AttentionBatch
from rollout.capture import RoutedExpertsCapturer, RoutedExpertsOutput
from rollout.cuda_graphs import GraphRunner
from rollout.kv_pool import KVPool
from rollout.router import watch
from storage.sites import find_routers
from tests.sim.engines import Mended, on_cpu, on_sim, outcomes
from tests.sim.test_graphs import with_tables

pytestmark = pytest.mark.full
OPTIONS = {"disable_cuda_graph": False, "cuda_graph_batch_sizes": [4]}


def results(rig):
    """Three requests in batches of four, of which two have slots that others had before; then again after a sleep."""
    found = []
    for round_ in range(2):
        requests = [
            rig.add(3 + index, 10 * round_ + index, max_tokens=3 + 4 * index, temperature=0, ignore_eos=True)
            for index in range(3)
        ]
        rig.finish()
        found += outcomes(requests)
        raises, rig.sim.raises = rig.sim.raises, False  # falling asleep may wait
        rig.built.sleep(level=1)
        rig.built.wake(None, 0)
        rig.sim.raises = raises
    return found


@pytest.fixture(scope="module")
def expected(path):
    rig = with_tables(on_cpu(path("qwen3_moe")), [4])
    rig.sim = SimpleNamespace(raises=False)
    found = results(rig)
    rig.built.close()
    return found


def graphs_kept_when_the_pool_moves(patch, rig):
    patch.setattr(GraphRunner, "clear", lambda self: None)


def inputs_not_refreshed(patch, rig):
    """The graph computes again the step that it was recorded with."""
    run = GraphRunner.run

    def stale(self, bucket, inputs, forward):
        recorded = self._recorded.get(bucket)
        return run(self, bucket, inputs if recorded is None else recorded.inputs, forward)

    patch.setattr(GraphRunner, "run", stale)


def mask_outlives_the_recording(patch, rig):
    """Computed in the forward before the recording, and a constant of the graph from then on."""
    opened = AttentionBatch.opened
    patch.setattr(AttentionBatch, "opened", lambda self: replace(opened(self), _masks=self._masks))


def padded_rows_captured(patch, rig):
    """As in sglang#36404."""
    end = RoutedExpertsCapturer.on_forward_end

    def padded(self, slots, segments=(), forwards=None, **rest):
        out = end(self, slots, segments, forwards=forwards, **rest)
        return RoutedExpertsOutput(slots, self._buffer[: sum(forwards)].to(self._dtype), None, segments, out.step)

    patch.setattr(RoutedExpertsCapturer, "on_forward_end", padded)


def padding_has_a_request_s_slot(patch, rig):
    patch.setattr(KVPool, "padding_slot", property(lambda self: 0))


def hooks_forgotten_at_replay(patch, rig):
    patch.setattr(RoutedExpertsCapturer, "repeated", lambda self, writes: None)


def one_site_not_recorded(patch, rig):
    patch.setattr(find_routers(rig.built.runner.model)[1].module, "_forward_hooks", {})


def second_model_recorded_with_it(patch, rig):
    """As a draft model that writes into the target's buffer (vllm#48622)."""
    runner = rig.built.runner
    logits = type(runner)._pool_logits
    first = find_routers(runner.model)[:1]

    def with_draft(self, *inputs):
        out = logits(self, *inputs)
        stop = watch(runner.model, first, lambda site, ids: self.capturer._write(site, ids.flip(0)))
        self.capturer._written[0] = 0
        logits(self, *inputs)
        stop()
        return out

    patch.setattr(type(runner), "_pool_logits", with_draft)


MUTANTS = [
    graphs_kept_when_the_pool_moves,
    inputs_not_refreshed,
    mask_outlives_the_recording,
    padded_rows_captured,
    padding_has_a_request_s_slot,
    hooks_forgotten_at_replay,
    one_site_not_recorded,
    second_model_recorded_with_it,
]


@pytest.fixture(scope="module")
def mended(path, expected):
    return Mended(lambda: on_sim(path("qwen3_moe"), **OPTIONS), lambda rig: check(rig, expected))


def check(rig, expected):
    assert results(rig) == expected


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__.replace("_", " "))
def test_the_check_sees_the_fault(mutate, mended, expected):
    rig = mended.healthy(lambda rig: rig.built.runner.graphs.clear())
    rig.built.runner.graphs.clear()
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, rig)
        with pytest.raises(AssertionError):
            check(rig, expected)
