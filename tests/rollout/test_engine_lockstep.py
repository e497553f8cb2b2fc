"""The engine as a rank of a group: when it agrees with the others, and that it changes its weights when all do.

The groups are made of threads here: agreements are exchanged in memory, and every rank has the whole model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.lockstep import Lockstep, Turn
from rollout.parallel import RankGroup
from tests.rollout.probes import device_held_at, greedy, prompts, wait_until

LONG = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True, seed=0)


class Control(RankGroup):
    """Agreements of a group of one; `others` are turns of ranks that always say the same."""

    def __init__(self) -> None:
        super().__init__(0, 1, "alltoall")
        self.agreed: list[tuple[int, Turn]] = []
        self.others: list[Turn] = []

    def all_gather_ints(self, values: Any, what: str) -> list[list[int]]:
        self.agreed.append((self.step, Turn(*values)))
        return [list(map(int, turn)) for turn in (values, *self.others)]


class Meeting(RankGroup):
    """Agreements of two ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, table: list[Any]) -> None:
        super().__init__(rank, 2, "alltoall")
        self._barrier, self._table = barrier, table

    def all_gather_ints(self, values: Any, what: str) -> list[list[int]]:
        self._table[self.rank] = [int(value) for value in values]
        self._barrier.wait(60)
        told = list(self._table)
        self._barrier.wait(60)
        return told


class InMemory(Lockstep):
    """A lockstep without connections."""

    def leave(self) -> None:
        pass


def join(client: RolloutClient, control: RankGroup) -> None:
    """Make the engine of this client a rank of the group."""
    built = client.backend._built  # type: ignore[attr-defined]
    built.lockstep = built.engine._lockstep = InMemory(control, control)


@pytest.fixture(scope="module")
def path(checkpoint) -> Path:
    return checkpoint("olmoe")


@pytest.fixture
def client(path: Path) -> Iterator[RolloutClient]:
    with RolloutClient.local(path, dtype="float32") as client:
        yield client


@pytest.fixture(scope="module")
def state(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def test_the_counts_of_the_next_step_are_agreed_while_this_one_runs_once_per_turn(client: RolloutClient) -> None:
    control = Control()
    join(client, control)
    engine = client.backend._built.engine  # type: ignore[attr-defined]
    turns, turn = [], engine.step
    engine.step = lambda: (turns.append(1), turn())
    with device_held_at(client, 5) as release:
        stream = client.stream(prompts(3), sampling_params=greedy(20))
        consumer = threading.Thread(target=list, args=(stream,))
        consumer.start()
        wait_until(lambda: engine.stats.forwards == 7)
        assert {event.step for event in engine.stats.events if event.kind == "finalize"} == set(range(5))
        assert [step for step, _ in control.agreed] == list(range(7))  # step 6 behind step 5, which is held
        assert [told.tokens for _, told in control.agreed[1:]] == [3] * 6
        release.set()
        consumer.join()
    wait_until(lambda: engine.resting)
    assert len(control.agreed) == len(turns)
    assert [step for step, told in control.agreed if told.tokens] == list(range(engine.stats.forwards))


def test_an_update_is_not_carried_out_before_the_other_ranks_are_ready(client: RolloutClient, state: Any) -> None:
    control = Control()
    control.others = [Turn(0, 1, 1, 1, pending=1, ready=0)]
    join(client, control)
    engine = client.backend._built.engine  # type: ignore[attr-defined]
    consumer = threading.Thread(target=client.sample, args=(prompts(2),), kwargs={"sampling_params": LONG})
    update = threading.Thread(target=client.update_weights, args=(state, 1), kwargs={"in_flight": "keep"})
    consumer.start()
    update.start()
    try:
        wait_until(lambda: sum(told.ready for _, told in control.agreed) > 20)
        assert engine.weight_version == 0
        control.others = [Turn(0, 1, 1, 1, pending=1, ready=1)]
        update.join(30)
        assert not update.is_alive()
        assert engine.weight_version == 1
    finally:
        control.others = []
    consumer.join(30)


@pytest.mark.full
def test_ranks_change_their_weights_behind_the_same_step_whenever_they_hear_of_it(path: Path, state: Any) -> None:
    barrier, table = threading.Barrier(2), [None, None]
    changed: list[tuple[int, int]] = []
    with RolloutClient.local(path, dtype="float32") as one, RolloutClient.local(path, dtype="float32") as other:
        threads = []
        for rank, client in enumerate((one, other)):
            join(client, Meeting(rank, barrier, table))
            built = client.backend._built  # type: ignore[attr-defined]

            def apply(*args: Any, rank=rank, built=built, before=built.apply_weights) -> None:
                changed.append((rank, built.engine.stats.forwards))
                before(*args)

            built.apply_weights = apply
            sampling = {"sampling_params": LONG.model_copy(update={"max_tokens": 60 + 40 * rank})}
            threads.append(threading.Thread(target=client.sample, args=(prompts(1 + rank),), kwargs=sampling))
        for thread in threads:
            thread.start()
        for rank, client in enumerate((one, other)):
            wait_until(lambda client=client, rank=rank: client.backend.stats.forwards > 10 + 10 * rank)  # type: ignore[misc]
            kwargs = {"in_flight": "keep"}
            threads.append(threading.Thread(target=client.update_weights, args=(state, 1), kwargs=kwargs))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert sorted(rank for rank, _ in changed) == [0, 1]
    assert len({forward for _, forward in changed}) == 1
    assert changed[0][1] > 20  # when the second rank had heard of it too


def test_a_rank_that_is_paused_before_an_update_waits_for_resume_and_does_not_refuse_alone(
    client: RolloutClient, state: Any
) -> None:
    """Others without requests would wait for it for ever."""
    join(client, Control())
    engine = client.backend._built.engine  # type: ignore[attr-defined]
    failed: list[BaseException] = []

    def update() -> None:
        try:
            client.update_weights(state, 1)  # in_flight="wait"
        except BaseException as error:
            failed.append(error)

    consumer = threading.Thread(target=client.sample, args=(prompts(2),), kwargs={"sampling_params": LONG})
    consumer.start()
    wait_until(lambda: engine.stats.forwards > 3)
    client.pause()
    updating = threading.Thread(target=update)
    updating.start()
    time.sleep(0.1)
    assert (failed, engine.weight_version) == ([], 0)
    client.resume()
    updating.join(30)
    assert not updating.is_alive()
    assert (failed, engine.weight_version) == ([], 1)
    consumer.join(30)
