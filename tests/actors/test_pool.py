"""ActorPool over Ray: every sample exactly once, whatever dies; load, backpressure, errors, weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ObjectLostError

from actors.dispatch import Dispatch, Limits
from actors.finished import RemoteFinished
from actors.pool import ActorPool
from actors.remote import LOST, fetch
from actors.slot import ActorSlot
from actors.stored_weights import StoredWeights
from rollout.update_modes import Unchanging
from storage.schema import to_table
from storage.trace import Trace
from tests.actors.fakes import SPEC, FakeBackend, expected_trace, make_request, make_requests
from tests.actors.waiting import eventually

ONE = torch.ones(1)

pytestmark = pytest.mark.usefixtures("cluster")


@contextmanager
def pool_of(num_actors: int, limits: Limits | None = None, **options: Any) -> Iterator[ActorPool]:
    limits = limits or Limits(chunk_samples=2, outstanding_chunks=2)
    pool = ActorPool(
        "model",
        num_actors=num_actors,
        engine_options=options,
        num_cpus=0.5,
        backend_factory=FakeBackend,
        limits=limits,
    )
    try:
        yield pool
    finally:
        pool.close()


def collect(pool: ActorPool, requests: list) -> list[Trace]:
    return [trace for finished in pool.stream(requests) for trace in finished.traces()]


def assert_exactly(traces: list[Trace], requests: list, version: int = 0) -> None:
    """Each request once, with the tokens and routes its sample id determines."""
    assert Counter(t.sample_id for t in traces) == Counter(r.sample_id for r in requests)
    by_id = {trace.sample_id: trace for trace in traces}
    for request in requests:
        expected = expected_trace(request, version)
        assert by_id[request.sample_id].completion_ids == expected.completion_ids
        assert (by_id[request.sample_id].routed_experts == expected.routed_experts).all()


def dispatch_of(pool: ActorPool, requests: list, limits: Limits) -> Dispatch:
    return Dispatch(pool._slots, requests, limits, SPEC, threading.Event())


def started(journal: Path) -> int:
    return len(list(journal.glob("start-*")))


@pytest.fixture(scope="module")
def pool(cluster: None) -> Iterator[ActorPool]:
    with pool_of(2) as pool:
        yield pool


def test_every_sample_once_from_both_actors(pool: ActorPool) -> None:
    requests = make_requests(prompts=10, samples=3, milliseconds=5)
    traces = collect(pool, requests)
    assert_exactly(traces, requests)
    assert len({trace.metadata["pid"] for trace in traces}) == 2
    assert pool.info.spec == SPEC


def test_results_stay_in_the_object_store_until_asked_for(pool: ActorPool) -> None:
    for finished in pool.stream(make_requests(prompts=2, samples=1)):
        assert isinstance(finished.ref, ray.ObjectRef)
        assert [t.sample_id for t in finished.traces()] == list(finished.sample_ids)
        assert finished.traces()[0] is finished.traces()[0]
        assert not finished.traces()[0].routed_experts.flags.writeable


def test_the_actor_with_less_to_do_gets_the_next_chunk(pool: ActorPool) -> None:
    slow = [make_request("run/0/slow/0", milliseconds=4000), make_request("run/0/slow/1")]
    requests = [*slow, *make_requests(prompts=40, samples=1, milliseconds=5)]
    limits = Limits(chunk_samples=2, outstanding_chunks=1)
    stream = dispatch_of(pool, requests, limits).run()
    pid_of = {trace.sample_id: trace.metadata["pid"] for finished in stream for trace in finished.traces()}
    counts = Counter(pid_of.values())
    assert counts.total() == 42
    assert pid_of["run/0/slow/0"] == min(counts, key=counts.__getitem__)
    assert 2 * min(counts.values()) < counts.total()
    assert pid_of["run/0/slow/0"] == pid_of["run/0/slow/1"] != pid_of["run/0/0/0"]


def test_a_paused_consumer_bounds_what_is_sampled(journal: Path) -> None:
    requests = make_requests(prompts=200, samples=1)
    with pool_of(2, Limits(chunk_samples=5, outstanding_chunks=3), journal=str(journal)) as pool:
        stream = pool.stream(requests)
        next(stream)
        time.sleep(0.7)
        assert started(journal) <= 2 * 3 * 5
        traces = [trace for finished in stream for trace in finished.traces()]
        assert started(journal) == 200
        assert len(traces) >= 200 - 5


def test_one_stream_of_an_actor_holds_a_bounded_number_of_objects(journal: Path) -> None:
    requests = make_requests(prompts=40, samples=1, milliseconds=20)
    limits = Limits(chunk_samples=40, outstanding_chunks=1, tables_in_flight=2)
    with pool_of(1, limits, journal=str(journal)) as pool:
        stream = pool.stream(requests)
        next(stream)
        assert eventually(lambda: started(journal) == 40)
        time.sleep(0.2)
        tables = 1 + sum(1 for _ in stream)
    assert tables <= 2 + 3  # unbounded, the 40 traces would have come in about 40 tables


def test_early_close_aborts_what_runs_and_starts_nothing_more(journal: Path) -> None:
    requests = [make_request("run/0/0/0"), *make_requests(prompts=30, samples=1, step=1, milliseconds=60_000)]
    with pool_of(1, journal=str(journal)) as pool:
        stream = pool.stream(requests)
        next(stream)
        assert eventually(lambda: started(journal) >= 2)
        stream.close()
        running = started(journal)
        assert eventually(lambda: len(list(journal.glob("abort-*"))) >= 1)
        time.sleep(0.3)
        assert started(journal) == running <= 3
        after = make_requests(prompts=3, samples=1, step=2)
        assert_exactly(collect(pool, after), after)


def test_a_stream_left_early_does_not_touch_the_next_one_with_the_same_samples(pool: ActorPool) -> None:
    requests = make_requests(prompts=8, samples=2, step=6, milliseconds=30)
    for _ in range(4):
        left = pool.stream(requests)
        next(left)
        left.close()
        assert next(left, None) is None
        assert_exactly(collect(pool, requests), requests)


def test_abort_from_another_thread_answers_what_is_left_and_spares_other_streams(pool: ActorPool) -> None:
    requests = [make_request("run/0/0/0"), *make_requests(prompts=7, samples=1, step=1, milliseconds=60_000)]
    others = make_requests(prompts=3, samples=1, step=1, milliseconds=600)
    stream, other = pool.stream(requests), pool.stream(others)
    first = next(stream).traces() + next(other).traces()
    threading.Timer(0.2, stream.abort).start()
    begin = time.monotonic()
    rest = [trace for finished in stream for trace in finished.traces()]
    assert time.monotonic() - begin < 1.5
    assert Counter(t.sample_id for t in [first[0], *rest]) == Counter(r.sample_id for r in requests)
    assert {(t.finish_reason, len(t.completion_ids)) for t in rest} == {("abort", 0)}
    assert_exactly([*first[1:], *(trace for finished in other for trace in finished.traces())], others)


def test_close_from_another_thread_ends_an_iterator_that_waits(pool: ActorPool) -> None:
    stream = pool.stream(make_requests(prompts=4, samples=1, step=1, milliseconds=60_000))
    threading.Timer(0.2, stream.close).start()
    begin = time.monotonic()
    assert list(stream) == []
    assert time.monotonic() - begin < 1.5


def test_abort_stops_the_actors_though_nobody_iterates(journal: Path) -> None:
    requests = [make_request("run/0/0/0"), make_request("run/0/1/0", milliseconds=60_000)]
    with pool_of(1, journal=str(journal)) as pool:
        stream = pool.stream(requests)
        next(stream)
        assert eventually(lambda: started(journal) == 2)
        stream.abort()
        assert eventually(lambda: (journal / "abort-run_0_1_0").exists(), seconds=2)
        assert [t.finish_reason for finished in stream for t in finished.traces()] == ["abort"]


def test_paused_streams_do_not_starve_the_next_one(pool: ActorPool) -> None:
    limits = Limits(chunk_samples=12, outstanding_chunks=6, tables_in_flight=1)
    paused = [
        dispatch_of(pool, make_requests(prompts=144, samples=1, step=step, milliseconds=5), limits).run()
        for step in range(3)
    ]
    for stream in paused:
        next(stream)
    requests, traces = make_requests(prompts=4, samples=1, step=7), []
    consumer = threading.Thread(target=lambda: traces.extend(collect(pool, requests)), daemon=True)
    consumer.start()
    consumer.join(timeout=5)
    assert not consumer.is_alive()
    assert_exactly(traces, requests)
    for stream in paused:
        stream.close()


@pytest.mark.full
def test_an_actor_replaced_right_after_it_was_found_ready_is_not_asked_before_it_has_its_model(monkeypatch) -> None:
    ready_handle, replaced = ActorSlot.ready_handle, []

    def then_replaced(slot: ActorSlot) -> Any:
        handle = ready_handle(slot)
        if handle is not None and not replaced:
            replaced.append(handle)
            slot.replace(handle, ActorDiedError())
        return handle

    requests = make_requests(prompts=4, samples=2)
    with pool_of(1, load_seconds=0.3) as pool:
        monkeypatch.setattr(ActorSlot, "ready_handle", then_replaced)
        assert_exactly(collect(pool, requests), requests)
    assert len(replaced) == 1


@pytest.mark.full
def test_what_an_actor_delivered_and_its_node_lost_is_sampled_again(monkeypatch) -> None:
    losses = [ObjectLostError("ab" * 28, None, "")]

    def losing(ref: Any) -> Any:
        if losses:
            raise losses.pop()
        return fetch(ref)

    requests = make_requests(prompts=6, samples=2)
    with pool_of(1) as pool:
        monkeypatch.setattr("actors.dispatch.fetch", losing)
        assert_exactly(collect(pool, requests), requests)
    assert losses == []


def test_an_actor_that_dies_in_mid_stream_loses_and_doubles_nothing(journal: Path) -> None:
    requests = make_requests(prompts=12, samples=4, milliseconds=5)
    limits = Limits(chunk_samples=6, outstanding_chunks=2)
    with pool_of(2, limits, journal=str(journal), die_at="run/0/5/1") as pool:
        traces = collect(pool, requests)
        figures = pool.figures()
    assert_exactly(traces, requests)
    assert len(list(journal.glob("death-*"))) == 1
    # the one that killed it and the two behind it in its chunk at least, at most two chunks of 6
    assert 3 <= figures["samples_resubmitted_total"] <= 12


def test_an_actor_killed_from_outside_is_replaced_with_the_current_weights() -> None:
    first, second = make_requests(prompts=2, samples=2), make_requests(prompts=6, samples=2, step=1)
    with pool_of(1) as pool:
        pool.update_weights({"w": ONE}, version=3)
        pid = collect(pool, first)[0].metadata["pid"]
        os.kill(pid, signal.SIGKILL)
        traces = collect(pool, second)
    assert_exactly(traces, second, version=3)
    assert {trace.weight_version for trace in traces} == {3}
    assert pid not in {trace.metadata["pid"] for trace in traces}


@pytest.mark.full
def test_a_sample_that_kills_every_actor_ends_the_stream_by_name(journal: Path) -> None:
    limits = Limits(chunk_samples=1, outstanding_chunks=1, max_attempts=2)
    with pool_of(1, limits, journal=str(journal), die_at="run/0/1/0", die_times=99) as pool:
        with pytest.raises(RuntimeError, match=r"2 actors died over samples \['run/0/1/0'\].*actor 0: ActorDiedError"):
            collect(pool, make_requests(prompts=3, samples=1))
        assert len(list(journal.glob("death-*"))) == 2


def test_an_engine_error_keeps_its_type_and_words_and_the_pool_survives() -> None:
    with pool_of(1, fail_at="run/0/1/0") as pool:
        with pytest.raises(ValueError, match=r"^sample run/0/1/0 hit a bad kernel$"):
            collect(pool, make_requests(prompts=3, samples=1))
        after = make_requests(prompts=2, samples=1, step=1)
        assert_exactly(collect(pool, after), after)


def test_a_model_that_does_not_load_raises_the_original_error() -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"^no model at /nowhere$"),
        pool_of(2, load_error="no model at /nowhere"),
    ):
        pass


def test_weights_that_do_not_fit_change_no_actor(pool: ActorPool) -> None:
    requests = make_requests(prompts=8, samples=1, step=4)
    with pytest.raises(ValueError, match=r"^unknown weights \['q'\]$"):
        pool.update_weights({"w": ONE, "q": ONE}, version=9)
    assert_exactly(collect(pool, requests), requests, version=0)


def test_weights_of_another_kind_are_refused_before_any_actor_is_asked(pool: ActorPool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"it is no directory; nothing was changed"):
        pool.update_weights(tmp_path / "7", version=9)
    with pytest.raises(ValueError, match="weights are a int; pass a state dict"):
        pool.update_weights(7, version=9)
    with pytest.raises(ValueError, match="weight 'w' is no dense tensor"):
        pool.update_weights({"w": 1}, version=9)
    with pytest.raises(ValueError, match="weight version 0 is not above the current 0; force=True allows it"):
        pool.update_weights({"w": ONE}, version=0)


@pytest.mark.parametrize("half", ["stage", "apply"])
@pytest.mark.full
def test_an_actor_that_dies_in_an_update_is_replaced_and_has_the_new_weights_before_it_samples(
    half: str, journal: Path
) -> None:
    """One of two actors dies in each half; the other goes through. None is left with the weights from before."""
    requests = make_requests(prompts=8, samples=1, step=2)
    with pool_of(2, journal=str(journal), die_at=half) as pool:
        pool.update_weights({"w": ONE}, version=5)
        traces = collect(pool, requests)
    assert_exactly(traces, requests, version=5)
    assert len({trace.metadata["pid"] for trace in traces}) == 2
    assert len(list(journal.glob("death-*"))) == 1


@pytest.mark.full
def test_an_update_that_kills_every_actor_is_an_error_and_the_old_weights_serve(journal: Path) -> None:
    requests = make_requests(prompts=4, samples=1, step=2)
    with pool_of(2, journal=str(journal), die_at="stage", die_times=2) as pool:
        with pytest.raises(LOST):
            pool.update_weights({"w": ONE}, version=5)
        assert_exactly(collect(pool, requests), requests, version=0)


def test_an_update_during_an_update_is_refused_by_name(pool: ActorPool) -> None:
    with pool.prepare_update({"w": ONE}, 6):
        with pytest.raises(RuntimeError, match="version 7 while update_weights to version 6 is under way"):
            pool.update_weights({"w": ONE}, version=7)
    requests = make_requests(prompts=4, samples=1, step=8)
    assert_exactly(collect(pool, requests), requests, version=0)  # the first one was left before it was applied


class WakesOnce(FakeBackend):
    """Of all actors, the first that is to wake refuses."""

    def wake(self, source: Any = None, version: int | None = None, **options: Any) -> None:
        try:
            (self._journal / "refused").open("x").close()
        except FileExistsError:
            super().wake(source, version, **options)
        else:
            raise RuntimeError("no memory left on the device")


@pytest.mark.full
@pytest.mark.parametrize("num_actors", [1, 2])
def test_all_actors_wake_or_none(journal: Path, num_actors: int) -> None:
    """Where one woke, one that could not is replaced; where none did, the pool sleeps on and may be woken again."""
    pool = ActorPool(
        "model",
        num_actors=num_actors,
        engine_options={"journal": str(journal)},
        num_cpus=0.5,
        backend_factory=WakesOnce,
        limits=Limits(chunk_samples=2, outstanding_chunks=2),
    )
    pool.sleep()
    if num_actors == 1:
        with pytest.raises(RuntimeError, match="no memory left on the device"):
            pool.wake({"w": ONE}, version=4)
    pool.wake({"w": ONE}, version=4)
    requests = make_requests(4, 3)
    assert_exactly(collect(pool, requests), requests, version=4)
    pool.close()


@pytest.mark.full
def test_a_sleeping_pool_refuses_to_sample_and_an_actor_that_dies_in_its_sleep_comes_back_asleep() -> None:
    requests = make_requests(prompts=4, samples=1, step=9)
    with pool_of(2) as pool:
        pool.update_weights({"w": ONE}, version=3)
        pool.sleep(level=2)
        with pytest.raises(RuntimeError, match=r"the actors sleep.*call wake\(\) before sampling"):
            pool.stream(requests)
        with pytest.raises(RuntimeError, match="update_weights while the actors sleep"):
            pool.update_weights({"w": ONE}, version=4)
        slot = pool._slots[0]
        ray.kill(slot.handle)
        slot.replace(slot.handle, RuntimeError("killed"))
        with pytest.raises(ValueError, match="kept no weights"):
            pool.wake()
        pool.wake({"w": ONE}, version=4)
        assert_exactly(collect(pool, requests), requests, version=4)


def test_closing_the_pool_ends_running_streams_with_abort() -> None:
    requests = make_requests(prompts=8, samples=1, milliseconds=60_000)
    with pool_of(1) as pool:
        stream = pool.stream([make_request("run/0/first/0"), *requests])
        next(stream)
        pool.close()
        reasons = {t.sample_id: t.finish_reason for finished in stream for t in finished.traces()}
    assert {reasons[request.sample_id] for request in requests} == {"abort"}
    with pytest.raises(RuntimeError, match="closed"):
        next(pool.stream(requests))


def test_a_second_arrival_of_a_sample_is_dropped(pool: ActorPool) -> None:
    requests = make_requests(prompts=1, samples=3)
    dispatch = dispatch_of(pool, requests, Limits())
    both, last = ([expected_trace(r) for r in part] for part in (requests[:2], requests[1:]))
    arrivals = [
        RemoteFinished(ray.put(to_table(traces, SPEC)), [t.sample_id for t in traces]) for traces in (both, both, last)
    ]
    fresh = [[t.sample_id for f in dispatch._first_arrivals(a) for t in f.traces()] for a in arrivals]
    assert fresh == [["run/0/0/0", "run/0/0/1"], [], ["run/0/0/2"]]


def test_requests_with_one_sample_id_twice_are_refused(pool: ActorPool) -> None:
    with pytest.raises(ValueError, match="2 requests share 1 sample ids"):
        next(pool.stream([make_request("run/0/0/0")] * 2))


def test_control_calls_answer_while_the_actor_samples(pool: ActorPool) -> None:
    stream = pool.stream([make_request("run/0/0/0"), make_request("run/0/1/0", milliseconds=60_000)])
    next(stream)
    begin = time.monotonic()
    health = [ray.get(slot.handle.health.remote()) for slot in pool._slots]
    assert time.monotonic() - begin < 1
    assert all(one["loaded"] for one in health)
    stream.close()


def test_no_actors_is_refused() -> None:
    with pytest.raises(ValueError, match="num_actors is 0"):
        ActorPool("model", num_actors=0)


def test_more_actors_than_the_cluster_can_ever_hold_are_refused_at_once(cluster: None) -> None:
    with pytest.raises(ValueError, match="9 actors of 1 CPU need 9, the cluster has 2; lower num_actors"):
        ActorPool("fake", num_actors=9, backend_factory=FakeBackend)


@pytest.mark.full
def test_all_actors_of_a_node_read_one_stored_copy_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store grows by the size of the weights once, not once per actor, and what actors read lies in it."""
    stored: list[StoredWeights] = []
    put = StoredWeights.put

    def noted(named: Any) -> StoredWeights:
        stored.append(put(named))
        return stored[-1]

    monkeypatch.setattr(StoredWeights, "put", noted)
    weights = {"w": torch.arange(1 << 20, dtype=torch.float32)}
    with pool_of(2) as pool:
        pool.update_weights(weights, version=1)
        (once,) = stored
        assert once.num_bytes == 4 << 20
        assert len(once.refs) == 1
        views = [once.tensors()["w"] for _ in range(2)]
        assert views[0].data_ptr() == views[1].data_ptr()  # shared memory, not a copy per reader
        assert torch.equal(views[0], weights["w"])
        assert isinstance(once.tensors(), Unchanging)  # an engine that is started again may load them again


# --- an engine that stands still --------------------------------------------------------------------------------------

QUICK = Limits(chunk_samples=2, outstanding_chunks=2, stall_seconds=1.0)
PATIENT = Limits(chunk_samples=2, outstanding_chunks=2, stall_seconds=4.0)  # longer than a busy machine takes


def test_an_engine_that_stands_still_is_replaced_and_its_samples_come_once(journal: Path, caplog) -> None:
    requests = make_requests(4, 2)
    with pool_of(1, QUICK, journal=str(journal), stall_at="run/0/2/1") as pool:
        assert_exactly(collect(pool, requests), requests)
    assert len(list(journal.glob("stall-*"))) == 1
    assert "generator actor 0 made no token for" in caplog.text


def test_a_slow_engine_is_left_alone_while_it_goes_on(journal: Path) -> None:
    requests = make_requests(9, 1, milliseconds=600)
    with pool_of(1, PATIENT, journal=str(journal)) as pool:
        pids = {trace.metadata["pid"] for trace in collect(pool, requests)}
    assert len(pids) == 1


@pytest.mark.full
def test_a_consumer_that_pauses_is_no_stall(journal: Path) -> None:
    requests = make_requests(6, 1, milliseconds=50)
    with pool_of(1, PATIENT, journal=str(journal)) as pool:
        stream = pool.stream(requests)
        first = next(stream).traces()
        time.sleep(6)  # the consumer pauses
        rest = [trace for finished in stream for trace in finished.traces()]
    assert_exactly([*first, *rest], requests)
    assert len({trace.metadata["pid"] for trace in rest}) == 1
