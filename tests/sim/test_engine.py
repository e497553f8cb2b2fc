"""The engine on the simulated device: tokens, logprobs and routes are the CPU's whenever kernels and copies run, and it
never waits where nobody asked it to."""

from __future__ import annotations

from functools import cache

import pytest

from tests.sim.engines import FAMILIES, mixed_workload, on_cpu, on_sim, outcomes, tiny
from tests.sim.streams import Seeded, copies_late, early, late

ADVERSARIES = {"late": late, "early": early, "copies late": copies_late, "random 1": Seeded(1), "random 2": Seeded(2)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return cache(lambda family: tiny(family, tmp_path_factory.mktemp(family)))


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
def on_device(path):
    """One engine per family; an implicit synchronisation is an error from here on."""
    opened = []

    @cache
    def build(family):
        rig = on_sim(path(family))
        opened.append(rig)
        rig.sim.syncs.clear()
        rig.sim.raises = True
        return rig

    yield build
    for rig in opened:
        rig.sim.raises = False
        rig.built.close()


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
