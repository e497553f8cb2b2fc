"""The engine on the simulated device: tokens, logprobs and routes are the CPU's whenever kernels and copies run, and it
never waits where nobody asked it to."""

from __future__ import annotations

from functools import cache

import pytest

from tests.sim.engines import FAMILIES, growing_workload, mixed_workload, on_cpu, on_sim, outcome, outcomes
from tests.sim.streams import Seeded, copies_late, early, late

ADVERSARIES = {"late": late, "early": early, "copies late": copies_late, "random 1": Seeded(1), "random 2": Seeded(2)}


@pytest.fixture(scope="module")
def expected(path):
    """What the CPU computes, once per family."""

    @cache
    def run(family):
        rig = on_cpu(path(family))
        found = outcomes(mixed_workload(rig)), rig.built.engine.stats.dropped_tokens
        rig.built.close()
        return found

    return run


@pytest.fixture(scope="module")
def on_device(open_on_device):
    return open_on_device


def test_the_workload_is_what_it_says(expected):
    """It ends by length, by stops with a token in flight, and by aborts, with and without tokens."""
    found, dropped = expected("qwen3_moe")
    assert [each["error"] for each in found] == [None] * len(found)
    reasons = [each["finish_reason"] for each in found]
    assert reasons.count("abort") == 3
    assert reasons.count("stop") >= 1
    assert {bool(each["tokens"]) for each in found if each["finish_reason"] == "abort"} == {True, False}
    assert dropped >= 1


QUICK = ("late", "copies late")
CASES = [
    pytest.param(family, adversary, marks=[] if family in FAMILIES[:2] or adversary in QUICK else pytest.mark.full)
    for family in FAMILIES
    for adversary in ADVERSARIES
]


@pytest.mark.parametrize(("family", "adversary"), CASES)
def test_every_result_equals_the_cpus_and_nothing_synchronises(family, adversary, on_device, expected):
    rig = on_device(family)
    rig.sim.scheduler.adversary = ADVERSARIES[adversary]
    assert outcomes(mixed_workload(rig)) == expected(family)[0]
    assert rig.sim.syncs == []


@pytest.mark.parametrize("adversary", QUICK)
def test_requests_that_yield_and_recompute_under_replay(path, adversary):
    """A pool too small for all: slots move, and rows computed again follow the frozen ones."""
    options = {"kv_tokens": 48, "max_running_requests": 4}
    cpu, device = on_cpu(path("qwen3_moe"), **options), on_sim(path("qwen3_moe"), **options)
    device.sim.scheduler.adversary, device.sim.raises = ADVERSARIES[adversary], True
    assert outcomes(growing_workload(device)) == outcomes(growing_workload(cpu))
    assert device.built.engine._scheduler.preemptions == cpu.built.engine._scheduler.preemptions > 0
    cpu.built.close()
    device.built.close()


def test_every_sampling_parameter_without_a_wait(path, on_device):
    """Penalties, bias, allowed and forbidden ids, top-n and prompt logprobs, all filters, beside each other."""
    params = [
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
        {"logit_bias": {5: 2.0}, "min_tokens": 3, "stop_token_ids": (7, 9)},
        {"allowed_token_ids": tuple(range(3, 90))},
        {"logprobs": 4, "prompt_logprobs": 2},
        {"min_p": 0.05, "top_k": 9, "top_p": 0.9, "temperature": 0.8},
    ]
    cpu, device = on_cpu(path("qwen3_moe")), on_device("qwen3_moe")
    device.sim.scheduler.adversary = late
    found = []
    for rig in (cpu, device):
        requests = [rig.add(6, i, max_tokens=6, ignore_eos=True, **each) for i, each in enumerate(params)]
        rig.finish()
        found.append(outcomes(requests))
    assert found[0] == found[1]
    assert [each["error"] for each in found[1]] == [None] * 5
    cpu.built.close()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_shutdown_with_a_step_in_flight(path, turns):
    """What was delivered before is right, the step in flight is processed, nothing is lost or invented."""
    rig = on_sim(path("mixtral"))
    request = rig.add(9, max_tokens=6, temperature=0, ignore_eos=True)
    for _ in range(turns):
        rig.turn()
    assert len(rig.built.engine._in_flight) == 1
    rig.built.engine.abort([request])
    rig.built.close()
    assert not rig.built.engine._in_flight
    assert request.finish_reason == "abort"
    assert len(request.output_ids) == max(turns - 1, 0)
    assert len(outcome(request)["routes"]) == (8 + len(request.output_ids) if request.output_ids else 0)


def test_a_length_finish_launches_no_extra_row(path):
    """Only a stop can be seen too late."""
    rig = on_sim(path("mixtral"))
    for index, count in enumerate((1, 2, 5)):
        rig.add(4, index, max_tokens=count, temperature=0, ignore_eos=True)
    rig.finish()
    assert rig.built.engine.stats.tokens == 3 * 4 + 0 + 1 + 4
    assert rig.built.engine.stats.dropped_tokens == 0
    rig.built.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"experts_implementation": "hit_experts"},
            "waits in every layer of device 'meta'.*use 'auto' or 'grouped_mm'",
        ),
        ({"experts_implementation": "eager"}, "waits in every layer"),
        ({"batch_invariant": True}, "batch_invariant=True is not available on device 'meta'; use device='cpu'"),
    ],
)
def test_options_that_an_accelerator_cannot_keep_are_refused_at_start(path, options, message):
    with pytest.raises(ValueError, match=message):
        on_sim(path("mixtral"), **options)
