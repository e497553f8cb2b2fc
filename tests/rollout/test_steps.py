"""Steps: who has which number, and what a number is worth after success and after failure."""

import threading

import pytest

from rollout.steps import Call, StepLedger
from storage import StepExistsError


def ledger(committed=(), unique=True) -> StepLedger:
    return StepLedger(lambda: committed, unique)


def test_bare_calls_are_numbered_after_the_last_step():
    steps = ledger([0, 1, 5])
    first = steps.begin(None)
    assert first == Call(step=6, number=0, commits=True)
    steps.end(first, done=True)
    assert steps.begin(None).step == 7


def test_the_first_step_is_zero():
    assert ledger().begin(None) == Call(0, 0, True)


def test_two_bare_calls_at_once_get_different_steps():
    steps = ledger()
    assert [steps.begin(None).step, steps.begin(None).step] == [0, 1]


def test_a_call_may_choose_its_step_and_leave_gaps():
    steps = ledger([0])
    assert steps.begin(9) == Call(9, 0, True)
    assert steps.begin(4) == Call(4, 0, True)
    assert steps.begin(None).step == 10


def test_a_committed_step_is_refused_with_the_next_free_one():
    with pytest.raises(StepExistsError, match="step 3 exists already; use step=4 or leave step out"):
        ledger([0, 3]).begin(3)


def test_a_step_that_another_call_is_writing_is_refused():
    steps = ledger()
    steps.begin(2)
    with pytest.raises(StepExistsError, match="step 2 exists already"):
        steps.begin(2)


def test_a_call_that_did_not_commit_gives_its_number_back():
    steps = ledger()
    steps.end(steps.begin(None), done=False)
    assert steps.begin(None).step == 0
    steps.end(steps.begin(4), done=False)
    assert steps.begin(4).step == 4


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step is -1, need an integer from 0 on"):
        ledger().begin(-1)


def test_without_a_dataset_a_number_is_a_label_that_may_repeat():
    steps = ledger(unique=False)
    for _ in range(2):
        call = steps.begin(3)
        steps.end(call, done=True)
        assert call.step == 3


def test_calls_in_an_open_step_share_it_and_are_numbered():
    steps = ledger([0])
    steps.open(7)
    calls = [steps.begin(None), steps.begin(7), steps.begin(None)]
    assert calls == [Call(7, 0, False, 1), Call(7, 1, False, 1), Call(7, 2, False, 1)]
    with pytest.raises(RuntimeError, match="step 7: 3 calls still run; nothing was committed"):
        steps.check_complete()
    for call in calls:
        steps.end(call, done=True)
    steps.check_complete()
    steps.close(committed=True)
    assert steps.begin(None) == Call(8, 0, True)


def test_a_call_left_early_spoils_the_open_step_but_not_the_next():
    steps = ledger()
    steps.open(0)
    steps.end(steps.begin(None), done=False)
    with pytest.raises(RuntimeError, match="step 0: a call was left early or failed; nothing was committed"):
        steps.check_complete()
    steps.close(committed=False)
    steps.open(0)
    steps.check_complete()


def test_a_check_claims_nothing():
    steps = ledger([0])
    steps.check(3)
    with pytest.raises(StepExistsError, match="step 0 exists already"):
        steps.check(0)
    assert steps.begin(3) == Call(3, 0, True)
    steps.open(4)
    steps.check(None)
    steps.check_complete()
    assert steps.begin(None) == Call(4, 0, False, 1)


def test_steps_that_another_client_committed_meanwhile_are_known():
    committed = [0]
    steps = StepLedger(lambda: committed, unique=True)
    assert steps.begin(None).step == 1
    committed += [1, 2]
    assert steps.begin(None).step == 3
    with pytest.raises(StepExistsError, match="step 2 exists already; use step=4"):
        steps.open(2)


def test_step_zero_can_be_open_too():
    steps = ledger()
    steps.open(0)
    assert steps.begin(None) == Call(0, 0, False, 1)
    with pytest.raises(ValueError, match=r"step=1 inside `with client.step\(0\)`; leave step out"):
        steps.begin(1)


def test_steps_do_not_nest():
    steps = ledger()
    steps.open(1)
    with pytest.raises(ValueError, match="step 1 is still open; steps do not nest"):
        steps.open(2)


@pytest.mark.parametrize("committed", [True, False])
def test_a_closed_step_is_free_again_unless_it_was_committed(committed):
    steps = ledger()
    steps.open(1)
    steps.close(committed)
    if committed:
        with pytest.raises(StepExistsError):
            steps.open(1)
    else:
        steps.open(1)
        assert steps.begin(None) == Call(1, 0, False, 2)


def test_a_committed_step_cannot_be_opened():
    with pytest.raises(StepExistsError, match="step 1 exists already; use step=2"):
        ledger([0, 1]).open(1)


def test_numbers_are_unique_under_threads():
    steps, found, barrier = ledger(), [], threading.Barrier(8)

    def take():
        barrier.wait()
        found.extend(steps.begin(None).step for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(400))
