"""Faults that would give wrong or lost rows, each applied to the real code path: the checks of this suite see them all.

Before each fault the same engine passes the same check, so that it is the fault that fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.capture import RoutedExpertsCapturer, RoutedExpertsOutput, RouteState
from rollout.device import AcceleratorStream, Event, PinnedBuffers
from rollout.engine import Engine
from rollout.forward_batch import GenerationBatchResult
from rollout.loader import move_model
from rollout.router import watch
from storage.sites import find_routers
from tests.sim.device import DEVICE, SimTensor
from tests.sim.engines import Mended, Rig, on_cpu, on_sim, outcomes, short_workload, tiny
from tests.sim.streams import Adversary, copies_late, late


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def expected(path):
    rig = on_cpu(path)
    found = outcomes(short_workload(rig))
    rig.built.close()
    return found


def check(rig: Rig, expected: list[dict[str, Any]]) -> None:
    """The check of this suite: results are the CPU's, no unasked wait, all routes finalized, also at a shutdown."""
    launched: list[GenerationBatchResult] = []
    launch = type(rig.built.runner).launch

    def spy(*arguments: Any) -> GenerationBatchResult:
        launched.append(launch(rig.built.runner, *arguments))
        return launched[-1]

    rig.built.runner.launch = spy
    try:
        assert outcomes(short_workload(rig)) == expected
        last = rig.add(5, max_tokens=9, temperature=0)
        rig.turn()
        rig.turn()
        rig.built.engine.abort([last])
        rig.built.engine.drain()
    finally:
        del rig.built.runner.launch
    states = [result.routed_experts_output.state for result in launched if result.routed_experts_output is not None]
    assert states == [RouteState.FINALIZED] * len(launched)
    assert rig.built.engine.idle


@pytest.fixture(scope="module")
def mended(path, expected):
    return Mended(lambda: on_sim(path), lambda rig: check(rig, expected))


Mutant = Callable[[pytest.MonkeyPatch, Rig], None]


def snapshot_is_a_view(patch, rig):
    """A buffer of the snapshot's dtype makes its narrowing cast a view (sglang#34319)."""
    capturer = rig.built.runner.capturer
    narrow = rig.built.stream.call(lambda: torch.zeros(capturer._buffer.shape, dtype=torch.uint8, device=DEVICE))
    patch.setattr(capturer, "_buffer", narrow)


def event_not_waited_for(patch, rig):
    patch.setattr(GenerationBatchResult, "finalize", lambda self: self.routed_experts_output.finalize())


def event_says_done_too_early(patch, rig):
    patch.setattr(Event, "synchronize", lambda self: None)
    patch.setattr(Event, "query", lambda self: True)


def finalized_before_the_event(patch, rig):
    def finalize(self):
        self.routed_experts_output.finalize()
        self.copy_done.synchronize()

    patch.setattr(GenerationBatchResult, "finalize", finalize)


def finalized_twice(patch, rig):
    finalize = RoutedExpertsOutput.finalize
    patch.setattr(RoutedExpertsOutput, "finalize", lambda self: (finalize(self), finalize(self)))


def never_finalized(when):
    """On one path of results the routes are left where they are (sglang#23885)."""

    def mutate(patch, rig):
        finalize = GenerationBatchResult.finalize

        def skipping(self):
            output = self.routed_experts_output
            if when(self.batch):
                self.routed_experts_output = None
            finalize(self)
            self.routed_experts_output = output

        patch.setattr(GenerationBatchResult, "finalize", skipping)

    return mutate


def steps_in_flight_dropped_at_shutdown(patch, rig):
    patch.setattr(Engine, "drain", lambda self: self._in_flight.clear())


def copies_do_not_wait_for_kernels(patch, rig):
    patch.setattr(rig.built.stream.copy, "wait_stream", lambda other: None)


class Careless(PinnedBuffers):
    """Lends the block that came back last, whatever its event says."""

    def take(self, like):
        for free in self._free.values():
            if free:
                free.rotate(1)
                free[0] = free[0][0], type("Done", (), {"query": lambda self: True})()
        return super().take(like)


def pinned_memory_reused_before_its_event(patch, rig):
    patch.setattr(rig.built.stream, "_buffers", Careless())


def outputs_overwritten_before_they_are_read(patch, rig):
    launch = AcceleratorStream.launch

    def releasing(self, work, event=None):
        event = launch(self, work, event)
        event.release()
        return event

    patch.setattr(rig.built.stream, "_buffers", Careless())
    patch.setattr(AcceleratorStream, "launch", releasing)


def memory_not_kept_for_the_copy(patch, rig):
    patch.setattr(SimTensor, "record_stream", lambda self, stream: None)


def slice_bounds_on_the_device(patch, rig):
    """As in sglang#24514."""
    begin = RoutedExpertsCapturer.on_forward_begin

    def by_scalar(self):
        begin(self)
        self._written = [torch.zeros((), dtype=torch.int64, device=DEVICE) for _ in self._written]

    patch.setattr(RoutedExpertsCapturer, "on_forward_begin", by_scalar)


def hook_of_one_site_removed(patch, rig):
    """As when a kernel routes inside (vllm#44116)."""
    patch.setattr(find_routers(rig.built.runner.model)[1].module, "_forward_hooks", {})


def second_model_with_the_same_sites(patch, rig):
    """As a draft model that writes into the target's buffer (vllm#48622)."""
    runner = rig.built.runner
    draft = AutoModelForCausalLM.from_pretrained(runner.model.name_or_path).eval()
    watch(draft, find_routers(draft)[:1], runner.capturer._write)
    patch.setattr(rig.sim, "raises", False)
    rig.built.stream.run(lambda: move_model(draft, DEVICE))
    rig.sim.syncs.clear()
    logits = type(runner).logits

    def with_draft(self, batch):
        draft.model.layers[0].mlp.gate(torch.zeros(len(batch.input_ids), draft.config.hidden_size, device=DEVICE))
        return logits(self, batch)

    patch.setattr(type(runner), "logits", with_draft)


MUTANTS: dict[str, tuple[Adversary, Mutant]] = {
    "snapshot is a view": (copies_late, snapshot_is_a_view),
    "event not waited for": (late, event_not_waited_for),
    "event says done too early": (late, event_says_done_too_early),
    "finalized before the event": (late, finalized_before_the_event),
    "finalized twice": (late, finalized_twice),
    "middle chunk not finalized": (late, never_finalized(lambda batch: not any(w.samples for w in batch))),
    "prefill not finalized": (late, never_finalized(lambda batch: not any(w.is_decode for w in batch))),
    "mixed step not finalized": (late, never_finalized(lambda batch: len({w.is_decode for w in batch}) == 2)),
    "decode not finalized": (late, never_finalized(lambda batch: all(w.is_decode for w in batch))),
    "last step of a request not finalized": (
        late,
        never_finalized(lambda batch: any(w.request.sampled == w.request.max_tokens for w in batch)),
    ),
    "step with an aborted request not finalized": (
        late,
        never_finalized(lambda batch: any(w.request.finish_reason == "abort" for w in batch)),
    ),
    "steps in flight dropped at shutdown": (late, steps_in_flight_dropped_at_shutdown),
    "copies do not wait for kernels": (late, copies_do_not_wait_for_kernels),
    "pinned memory reused before its event": (late, pinned_memory_reused_before_its_event),
    "outputs overwritten before they are read": (late, outputs_overwritten_before_they_are_read),
    "memory not kept for the copy": (copies_late, memory_not_kept_for_the_copy),
    "slice bounds on the device": (late, slice_bounds_on_the_device),
    "hook of one site removed": (late, hook_of_one_site_removed),
    "second model with the same sites": (late, second_model_with_the_same_sites),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_check_sees_the_fault(mutant, mended, expected):
    adversary, mutate = MUTANTS[mutant]
    rig = mended.healthy(lambda rig: setattr(rig.sim.scheduler, "adversary", adversary))
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch, rig)
        with pytest.raises(AssertionError):
            check(rig, expected)


def test_padded_rows_are_no_tokens(path):
    """Batch-invariant steps are padded; a snapshot with the padding in it is refused (sglang#36404)."""
    rig = on_cpu(path, batch_invariant=True, experts_implementation="auto")
    with pytest.MonkeyPatch.context() as patch:
        end = RoutedExpertsCapturer.on_forward_end

        def padded(self, slots, segments=(), forwards=None, **rest):
            out = end(self, slots, segments, forwards=forwards, **rest)
            return RoutedExpertsOutput(slots, self._buffer[: sum(forwards)].to(torch.uint8), None, segments, out.step)

        patch.setattr(RoutedExpertsCapturer, "on_forward_end", padded)
        failed = rig.add(5, max_tokens=2, temperature=0)
        rig.finish()
    assert "32 rows for 5 tokens" in failed.error
    whole = rig.add(5, max_tokens=2, temperature=0)
    rig.finish()
    assert (whole.error, len(whole.routes.take())) == (None, 6)
    rig.built.close()
