"""What becomes of a group whose ranks die at an awkward moment. Its ranks are fakes that keep what they were told."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rollout import rank_process, self_test
from rollout.backend import SampleRequest
from rollout.group_life import GroupLife
from rollout.group_weights import SavedWeights
from rollout.parallel import CollectiveError
from rollout.rank_link import RankDiedError
from rollout.rank_messages import Ended
from rollout.sampling import SamplingParams

NEW = SavedWeights("/weights-7", 7, False)
STAGED = ("stage", "/weights-7", False, 7, True, False)


class Ranks:
    """A RankSet of two that answers at once. `die_over`: the command that it does not survive."""

    def __init__(self, on_ended: Any, on_death: Any, die_over: str | None = None) -> None:
        self.on_ended, self.on_death, self.die_over = on_ended, on_death, die_over
        self.asked: list[tuple] = []
        self.told: list[tuple[str, dict]] = []
        self.reason: RankDiedError | None = None
        self.killed = self.serving = False
        self.loaded, self.starts = threading.Event(), threading.Event()
        self.loaded.set()

    def start(self, starts: Any) -> SimpleNamespace:
        self.starts.set()
        self.loaded.wait()
        if self.reason is not None:
            raise self.reason
        self.serving = True
        return SimpleNamespace(spec="info")

    def ask(self, name: str, *args: Any, within: float | None = None) -> list[None]:
        self.asked.append((name, *args))
        if self.reason is None and name == self.die_over:
            self.die()
        if self.reason is not None:
            raise self.reason
        if args == ("refused",):
            raise ValueError("no")
        return [None, None]

    def tell(self, name: str, args: dict) -> None:
        self.told.append((name, args))

    def kill(self) -> None:
        self.killed, self.serving = True, False
        self.reason = self.reason or RankDiedError("killed")
        self.loaded.set()

    def die(self) -> None:
        self.reason = RankDiedError("rank 1 of 2 died")
        if self.serving:
            self.on_death(self, self.reason)


class Stream:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, ended: Any) -> None:
        self.got.append(ended)


@pytest.fixture
def group():
    """`start(...)`: the life of a group whose n-th ranks die over the n-th command, and the list of all its ranks.

    "load" is no command: such ranks load until they are killed.
    """

    def start(*die_over: str | None) -> tuple[GroupLife, list[Ranks]]:
        deaths, made = list(die_over), []

        def new_ranks(on_ended: Any, on_death: Any) -> tuple[Ranks, list]:
            death = deaths.pop(0) if deaths else None
            made.append(Ranks(on_ended, on_death, death))
            if death == "load":
                made[-1].loaded.clear()
            return made[-1], []

        return GroupLife(2, new_ranks), made

    return start


def request(prompt: int, max_tokens: int) -> SampleRequest:
    return SampleRequest(f"run/0/{prompt}/0", 0, (1,) * prompt, SamplingParams(max_tokens=max_tokens, seed=0))


def submitted(ranks: Ranks) -> dict[int, list[int]]:
    """Numbers by rank."""
    found: dict[int, list[int]] = {}
    for name, args in ranks.told:
        for rank, (tickets,) in args.items() if name == "submit" else ():
            found.setdefault(rank, []).extend(number for number, _ in tickets)
    return found


def test_requests_go_to_the_rank_with_the_fewest_outstanding_tokens(group):
    life, (ranks,) = group()
    stream = Stream()
    life.submit([request(10, 90), request(10, 20), request(10, 30), request(10, 40)], stream)
    assert submitted(ranks) == {0: [0], 1: [1, 2, 3]}  # 100 tokens; 30, 70 and 120
    ranks.on_ended(Ended(1, None))
    ranks.on_ended(Ended(3, None))
    life.submit([request(10, 5)], stream)
    assert submitted(ranks) == {0: [0], 1: [1, 2, 3, 4]}


def test_what_had_not_arrived_is_sampled_by_the_next_ranks_once_and_what_was_aborted_is_ended_there(group):
    life, made = group()
    stream = Stream()
    life.submit([request(10, 10) for _ in range(4)], stream)
    made[0].on_ended(Ended(2, None))
    life.end([1])
    made[0].die()
    assert submitted(made[1]) == {0: [0, 3], 1: [1]}
    assert [args for name, args in made[1].told if name == "end"] == [{1: ([1],)}]
    made[0].on_ended(Ended(0, None))  # it was under way when the ranks died
    made[1].on_ended(Ended(0, None))
    assert [ended.ticket for ended in stream.got] == [2, 0]


@pytest.mark.parametrize("when", ["before the update is known", "over the update", "after it"])
def test_whenever_ranks_die_during_an_update_those_that_serve_have_the_new_weights(group, when):
    life, made = group("apply" if when == "over the update" else None)
    staged = life.ask_living("stage", *NEW.where, 7, False, False)
    if when == "before the update is known":
        staged.die()
        assert made[1].asked == []  # they serve the old weights
    life.reach(staged, "apply", ["keep", "keep"], weights=NEW)
    if when == "after it":
        staged.die()
    assert life.ranks is made[-1]
    assert made[-1].asked == [STAGED, ("apply", "keep", "keep")]
    assert all(ranks.killed or ranks.reason for ranks in made[:-1])
    assert life.wanted.weights is NEW


def test_a_neighbour_that_is_lost_in_the_self_test_is_no_fault_of_the_model_and_the_group_is_started_again(
    group, monkeypatch
):
    life, made = group()
    lost = [CollectiveError("rank 0 of 2, step -1: expert inputs of layer 0 did not complete")]

    def forward(*args):
        raise lost.pop()

    def start(ranks, starts):  # as a rank does, whose error comes over a pipe
        if lost:
            try:
                self_test._supported_forward(SimpleNamespace(model=None, own_caches=None), [1], [1])
            except Exception as error:
                raise rank_process.portable(error) from error
        return before(ranks, starts)

    before = Ranks.start
    monkeypatch.setattr(self_test, "engine_forward", forward)
    monkeypatch.setattr(Ranks, "start", start)
    made[0].die()
    assert life.ranks is made[2]
    assert lost == []


def test_ranks_that_die_while_they_stage_are_followed_by_ranks_that_do(group):
    life, made = group("stage", "stage")
    assert life.ask_living("stage", *NEW.where, 7, False, False) is made[2]


def test_ranks_that_die_again_and_again_are_declared_dead_and_their_streams_are_told(group):
    life, made = group("stage", "stage", "stage")
    stream = Stream()
    life.submit([request(1, 1)], stream)
    with pytest.raises(RankDiedError, match="rank 1 of 2 died"):
        life.ask_living("stage", *NEW.where, 7, False, False)
    assert len(made) == 3
    (error,) = stream.got
    assert str(error) == "the ranks died 3 times in a row; at last: rank 1 of 2 died"
    with pytest.raises(RuntimeError, match="this group of ranks is closed") as raised:
        life.submit([request(1, 1)], stream)
    assert raised.value.__cause__ is error


def test_ranks_that_refuse_leave_the_group_as_it_was(group):
    life, (ranks,) = group()
    with pytest.raises(ValueError, match="no"):
        life.reach(ranks, "pause", ["refused"], paused=True)
    assert not life.wanted.paused
    ranks.die()
    assert life.ranks.asked == []


def test_new_ranks_rest_sleep_and_wake_as_the_old_ones_did(group):
    life, made = group(None, "wake")
    life.submit([request(1, 1)], Stream())
    life.reach(life.ranks, "apply", ["keep", "keep"], weights=NEW)
    life.reach(life.ranks, "pause", ["wait"], paused=True)
    life.reach(life.ranks, "sleep", [2, "abort"], asleep=2)
    made[0].die()
    asleep = [STAGED, ("apply", "keep", "keep"), ("pause", "keep"), ("sleep", 2, "abort")]
    assert made[1].asked == asleep
    awake = life.ask_living("wake", None, False, None, False, False)  # these die over it, the next ones do not
    life.reached(awake, asleep=0)
    assert made[2].asked == [*asleep, ("wake", None, False, None, False, False)]
    made[2].on_ended(Ended(0, None))  # a sign of life: the deaths before it do not count any more
    made[2].die()
    assert made[3].asked == asleep[:-1]


def test_ranks_that_die_just_after_they_woke_are_not_followed_by_sleeping_ones(group):
    life, made = group()
    life.reach(life.ranks, "sleep", [1, "wait"], asleep=1)
    awake = life.ask_living("wake", None, False, None, False, False)
    awake.die()  # before the group knows that it is awake
    life.reached(awake, asleep=0)
    assert life.ranks is made[2]
    assert made[1].killed
    assert made[2].asked == []


def test_closing_the_group_ends_ranks_that_are_still_loading_and_starts_no_others(group):
    life, made = group(None, "load")
    stream = Stream()
    life.submit([request(1, 1)], stream)
    death = threading.Thread(target=made[0].die)  # which starts the next ones
    death.start()
    while len(made) < 2:
        time.sleep(0.001)
    assert made[1].starts.wait(60)
    life.close()
    death.join(60)
    assert not death.is_alive()
    assert (len(made), made[1].killed) == (2, True)
    assert [str(error) for error in stream.got] == ["this group of ranks is closed"]
