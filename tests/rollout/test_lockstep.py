"""What a rank concludes from what all ranks tell each other before a step."""

import pytest
import torch.distributed as dist

from rollout.lockstep import Lockstep, Membership, Turn
from rollout.parallel import CollectiveError, RankGroup, StepShape

NOTHING = Turn(0, 1, 1, 0)


class Told(RankGroup):
    """The control group of rank 0, beside ranks that say what the test gives them to say."""

    others: list[Turn]

    def all_gather_ints(self, values, what):
        self.sent = Turn(*values)
        return [list(map(int, turn)) for turn in (values, *self.others)]


@pytest.fixture
def lockstep():
    control = Told(0, 2, "alltoall")
    return Lockstep(RankGroup(0, 2, "alltoall"), control, graph_batches=(8, 4)), control


def agree(lockstep, mine, *others):
    rank, control = lockstep
    control.others = list(others)
    return rank.agree(7, mine)


def test_the_shape_has_the_counts_and_the_padding_of_every_rank(lockstep):
    assert agree(lockstep, Turn(3, 32, 0, 1), Turn(40, 64, 0, 1)) == StepShape((3, 40), None, (32, 64))


def test_a_rank_without_work_joins_with_one_row(lockstep):
    assert agree(lockstep, NOTHING, Turn(5, 5, 0, 1)).rows == (1, 5)


@pytest.mark.parametrize(("largest", "graph"), [(1, 4), (4, 4), (5, 8), (9, None)])
def test_ranks_that_only_decode_are_padded_to_the_smallest_graph_that_holds_them(lockstep, largest, graph):
    assert agree(lockstep, NOTHING, Turn(largest, largest, 1, 1)).graph_batch == graph


def test_one_prompt_keeps_all_from_the_graph(lockstep):
    assert agree(lockstep, Turn(1, 1, 1, 1), Turn(2, 2, 0, 1)).graph_batch is None


def test_no_step_without_tokens_but_no_rest_while_one_rank_is_busy(lockstep):
    assert agree(lockstep, NOTHING, NOTHING._replace(busy=1)) is None
    assert not lockstep[0].idle
    assert agree(lockstep, NOTHING, NOTHING) is None
    assert lockstep[0].idle


def test_ranks_do_not_rest_before_all_have_heard_of_the_last_submission(lockstep):
    lockstep[0].wake(4)
    agree(lockstep, NOTHING, NOTHING._replace(epoch=3))
    assert not lockstep[0].idle
    agree(lockstep, NOTHING, NOTHING._replace(epoch=4))
    assert lockstep[0].idle
    lockstep[0].wake(5)
    assert not lockstep[0].idle


def test_an_update_is_carried_out_when_every_rank_is_ready_and_keeps_all_awake_until_then(lockstep):
    rank, _ = lockstep
    assert not rank.may_change(ready=True)
    agree(lockstep, NOTHING, NOTHING)  # the other rank has not heard of it
    assert not rank.may_change(ready=True)
    assert not rank.idle
    agree(lockstep, NOTHING, NOTHING._replace(pending=1, ready=1))
    assert rank.may_change(ready=True)
    rank.changed()
    assert agree(lockstep, NOTHING, NOTHING) is None
    assert rank.idle


def test_a_rank_that_was_started_with_something_else_is_named_with_what_it_is(lockstep):
    rank, control = lockstep
    control.all_gather_ints = lambda values, what: [values, [values[0], values[1] + 1]]
    with pytest.raises(ValueError, match=r"rank 1 has another dtype than rank 0. Rank 0 has {'dtype': 'float32'}"):
        rank.compare({"checkpoint": "a", "dtype": "float32"}, "options")


def test_ranks_that_do_not_all_come_to_the_control_group_are_missed_as_those_that_never_came(monkeypatch, tmp_path):
    def alone(**kwargs):
        raise dist.DistBackendError("Timed out after 1s waiting for clients")

    monkeypatch.setattr(dist, "new_group", alone)
    with pytest.raises(CollectiveError, match=r"rank 0 of 1 waited 1 s for the others .*waiting for clients"):
        Lockstep.join(Membership(0, 1, "alltoall", f"file://{tmp_path}/meeting", timeout_s=1))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"rank": 2}, "rank 2 is not in a group of 2"),
        ({"layout": "broadcast"}, "'broadcast', need 'allgather' or 'alltoall'"),
        ({"timeout_s": 0}, "timeout is 0 s"),
    ],
)
def test_a_membership_that_cannot_be(bad, message):
    with pytest.raises(ValueError, match=message):
        Membership(**{"rank": 0, "size": 2, "layout": "alltoall", "init_method": "file:///x", **bad})
