"""The scheduler: every token computed once, within budget, in order of arrival, and every request comes to its end."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.backend import SampleRequest
from rollout.request import Request
from rollout.sampling import SamplingParams
from rollout.scheduler import NoStore, Scheduler, Work, _power_of_two, flatten
from rollout.stops import StopChecker

KV_TOKENS = 24
LENGTHS = st.tuples(st.integers(1, 12), st.integers(0, 12))


def request(name: int | str, prompt_len: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    sample = SampleRequest(f"run/0/{name}/0", 0, (5,) * prompt_len, params)
    return Request(sample, StopChecker(params, (), None), random_key=0, routes=None)


def queue(scheduler: Scheduler, lengths) -> list[Request]:
    requests = [request(index, *sizes) for index, sizes in enumerate(lengths)]
    for entry in requests:
        scheduler.add(entry)
    return requests


def process(scheduler: Scheduler, batch: list[Work], stop_after: dict[Request, int]) -> None:
    """What the engine does with a step's results: count tokens, release what has ended."""
    for work in batch:
        entry = work.request
        entry.in_flight -= 1
        if entry.finish_reason is None:
            if work.samples and entry.max_tokens:
                entry.output_ids.append(0)
            wanted = min(stop_after.get(entry, entry.max_tokens), entry.max_tokens)
            if len(entry.output_ids) >= wanted and work.samples:
                entry.finish_reason = "length"
                scheduler.release(entry)


def run(scheduler: Scheduler, overlap: bool, stop_after=None, check=lambda batch: None) -> list[list[Work]]:
    """All steps until idle. With overlap the next step is scheduled before the last one is processed."""
    steps, in_flight = [], []
    while not scheduler.idle or in_flight:
        batch = scheduler.schedule()
        check(batch)
        if batch:
            steps.append(batch)
            in_flight.append(batch)
        assert in_flight, "no work and nothing to wait for: the scheduler is stuck"
        while len(in_flight) > (1 if overlap and batch else 0):
            process(scheduler, in_flight.pop(0), stop_after or {})
    return steps


@given(
    lengths=st.lists(LENGTHS, min_size=1, max_size=12),
    max_running=st.integers(1, 5),
    budget=st.integers(1, 20),
    overlap=st.booleans(),
    early=st.lists(st.integers(1, 12), max_size=12),
)
def test_any_load_is_computed_completely_and_within_limits(lengths, max_running, budget, overlap, early):
    scheduler = Scheduler(max_running, budget, KV_TOKENS)
    requests = queue(scheduler, lengths)

    def check(batch):
        assert sum(work.length for work in batch) <= budget
        assert len({id(work.request) for work in batch}) == len(batch) <= max_running
        assert all(work.length >= 1 for work in batch)
        decodes = [work.is_decode for work in batch]
        assert decodes == sorted(decodes, reverse=True), (
            "decodes come first: the engine reads their tokens on the device"
        )
        check_owners(scheduler)

    steps = run(scheduler, overlap, dict(zip(requests, early, strict=False)), check)
    spans = defaultdict(list)
    for work in (work for batch in steps for work in batch):
        spans[work.request].append(work)
    for index, entry in enumerate(requests):
        check_spans(entry, spans[entry], early[index] if index < len(early) else None, overlap)
    assert scheduler.slots.free_slots == KV_TOKENS
    assert sorted(scheduler._rows) == list(range(max_running))


def check_owners(scheduler: Scheduler) -> None:
    """No row and no slot has two owners, whoever is running."""
    slots = [slot for r in scheduler.running for slot in range(r.slot, r.slot + r.capacity)]
    rows = [r.row for r in scheduler.running]
    assert all(r.computed <= r.capacity <= _power_of_two(r.max_rows) for r in scheduler.running)
    scheduler.check()
    assert len(set(slots)) == len(slots)
    assert len(set(rows)) == len(rows)
    assert scheduler.slots.free_slots == KV_TOKENS - len(slots)


def check_spans(entry: Request, works: list[Work], early: int | None, overlap: bool) -> None:
    """Positions follow each other without gap or overlap: the whole prompt, then one token at a time. A request that
    yielded begins again at 0; what it samples goes on where it was."""
    assert entry.finish_reason == "length"
    positions = [position for work in works for position in range(work.start, work.start + work.length)]
    begun = [i for i, position in enumerate(positions) if position == 0]
    for start, end in itertools.pairwise([*begun, len(positions)]):
        assert positions[start:end] == list(range(end - start))
    assert all(work.length == 1 for work in works if work.start > entry.known)
    sampled_at = [work.start + work.length - 1 for work in works if work.samples]
    assert sampled_at == list(range(entry.prompt_len - 1, entry.prompt_len - 1 + len(sampled_at))), (
        "each token is drawn once; a prompt-only request draws once too, so that logits that are not finite are seen"
    )
    samples, tokens = len(sampled_at), min(early or entry.max_tokens, entry.max_tokens)
    assert len(entry.output_ids) == tokens
    if entry.yielded:
        return
    if early is None or early >= entry.max_tokens:
        assert len(positions) == entry.max_rows, (
            "an end by length is known when scheduling: nothing is computed in vain"
        )
        assert samples == max(entry.max_tokens, 1)
    else:
        assert tokens <= samples <= tokens + overlap, "an early stop costs at most one token, and only with overlap"


@given(lengths=st.lists(LENGTHS, min_size=2, max_size=12), budget=st.integers(1, 20), max_running=st.integers(1, 4))
def test_requests_start_in_order_of_arrival(lengths, budget, max_running):
    scheduler = Scheduler(max_running, budget, KV_TOKENS)
    requests = queue(scheduler, lengths)
    started = list(dict.fromkeys(work.request for batch in run(scheduler, True) for work in batch))
    assert started == requests


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_slots():
    scheduler = Scheduler(max_running_requests=4, max_batch_tokens=64, kv_tokens=10)
    running, large, small = queue(scheduler, [(4, 2), (8, 2), (1, 1)])
    assert [work.request for work in scheduler.schedule()] == [running]
    assert list(scheduler.waiting) == [large, small]


def test_the_schedule_of_a_hand_computed_load():
    """Prompts of 5 and 2 tokens with a budget of 4: chunks of 4 and 1, and the second prompt fills what is left."""
    scheduler = Scheduler(max_running_requests=2, max_batch_tokens=4, kv_tokens=20)
    a, b = queue(scheduler, [(5, 2), (2, 3)])
    steps = [[(w.request, w.start, w.length, w.samples) for w in batch] for batch in run(scheduler, overlap=False)]
    assert steps == [
        [(a, 0, 4, False)],
        [(a, 4, 1, True), (b, 0, 2, True)],
        [(a, 5, 1, True), (b, 2, 1, True)],
        [(b, 3, 1, True)],
    ]


def test_decodes_are_not_starved_by_a_long_prompt():
    scheduler = Scheduler(max_running_requests=2, max_batch_tokens=3, kv_tokens=40)
    first, long = queue(scheduler, [(1, 6), (20, 1)])
    shares = [{w.request: w.length for w in batch} for batch in run(scheduler, overlap=True)]
    assert [share.get(first, 0) for share in shares[:6]] == [1] * 6
    assert [share.get(long, 0) for share in shares[:6]] == [2] * 6


def test_a_waiting_request_can_be_released_and_holds_nothing():
    scheduler = Scheduler(max_running_requests=1, max_batch_tokens=8, kv_tokens=8)
    first, second = queue(scheduler, [(3, 3), (3, 3)])
    scheduler.schedule()
    scheduler.release(second)
    assert list(scheduler.requests()) == [first]
    scheduler.release(first)
    assert scheduler.idle
    assert scheduler.slots.free_slots == 8


def test_slots_of_a_released_request_serve_the_next_one():
    scheduler = Scheduler(max_running_requests=2, max_batch_tokens=8, kv_tokens=5)
    first, second = queue(scheduler, [(3, 3), (2, 4)])
    scheduler.schedule()
    assert second.slot == -1
    freed = first.slot, first.row
    scheduler.release(first)
    scheduler.schedule()
    assert (second.slot, second.row) == freed


def test_the_youngest_yields_when_the_pool_is_full_and_comes_back_with_what_it_sampled():
    """24 slots for three requests of up to 20: two grow until the third has to go."""
    scheduler = Scheduler(max_running_requests=3, max_batch_tokens=64, kv_tokens=24)
    old, middle, young = queue(scheduler, [(4, 9), (4, 9), (4, 9)])
    order = []
    while young.finish_reason is None:
        batch = scheduler.schedule()
        order.append([(work.request, work.start, work.length) for work in batch])
        scheduler.check()
        process(scheduler, batch, {})
    assert (old.yielded, middle.yielded, young.yielded) == (False, False, False)
    assert scheduler.preemptions == 0, "the third waited: 12 slots are each request's longest, and none has less"
    scheduler = Scheduler(max_running_requests=3, max_batch_tokens=64, kv_tokens=48)
    requests = queue(scheduler, [(4, 25), (4, 25), (4, 25)])
    run(scheduler, overlap=True, check=lambda _batch: scheduler.check())
    assert [entry.yielded for entry in requests] == [False, True, True], "28 slots each: only one fits at its longest"
    assert [len(entry.output_ids) for entry in requests] == [25] * 3


def test_a_run_of_slots_grows_in_place_or_moves_with_its_contents():
    moves = []

    class Store(NoStore):
        def move_slots(self, source, target, count):
            moves.append((source, target, count))

    scheduler = Scheduler(max_running_requests=2, max_batch_tokens=64, kv_tokens=120, store=Store())
    first, second = queue(scheduler, [(4, 60), (4, 60)])
    while first.computed < 17:
        process(scheduler, scheduler.schedule(), {})
    assert moves == [(0, 32, 16), (16, 0, 16)]
    assert (first.slot, first.capacity, second.slot, second.capacity) == (32, 32, 0, 32)


def test_an_integrity_check_names_what_leaked():
    scheduler = Scheduler(max_running_requests=1, max_batch_tokens=8, kv_tokens=8)
    (entry,) = queue(scheduler, [(3, 3)])
    scheduler.schedule()
    scheduler.check()
    scheduler.running.remove(entry)
    with pytest.raises(RuntimeError, match=r"rows \[\] of 1 are free or in use: one leaked"):
        scheduler.check()
    scheduler._rows.append(0)
    with pytest.raises(RuntimeError, match="slot 0 leaked"):
        scheduler.check()


def test_flatten_gives_position_and_slot_of_each_token():
    a, b = request("a", 5, 1), request("b", 4, 3)
    a.slot, b.slot = 10, 2
    position, slot = flatten([Work(b, 4, 1, True), Work(a, 1, 3, False)])
    assert position.tolist() == [4, 1, 2, 3]
    assert slot.tolist() == [6, 11, 12, 13]
    assert position.dtype == slot.dtype == np.int64


# --- the capture buffer -----------------------------------------------------------------------------------------


def test_more_tokens_per_step_than_can_be_captured_are_refused_at_start():
    with pytest.raises(ValueError, match="max_batch_tokens=33, but routes are captured of 32 at most"):
        Scheduler(4, 33, KV_TOKENS, max_step_tokens=32)


def test_a_whole_prompt_that_could_overflow_the_capture_buffer_is_refused_before_it_waits():
    """Budget 8: a prompt of 5 that begins at the last of 8 tokens makes a step of 7 + 5."""
    scheduler = Scheduler(4, 8, KV_TOKENS, whole_prompts=True, max_step_tokens=12)
    scheduler.check_fits(request(0, 5, 0))
    with pytest.raises(ValueError, match=r"all 6 tokens .* could have 13, .* captured of 12 at most; lower max_"):
        scheduler.check_fits(request(1, 6, 0))
    Scheduler(4, 8, KV_TOKENS, max_step_tokens=8).check_fits(request(2, 12, 12))
