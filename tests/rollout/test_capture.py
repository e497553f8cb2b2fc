"""Routes from a step to a request: each row arrives once, as it was, or there is an error."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.capture import RoutedExpertsOutput, RouteSegment, RouteState
from rollout.device import CpuStream, Event
from rollout.forward_batch import GenerationBatchResult
from rollout.request_routes import MOST_LATE, RequestRoutes
from storage import RoutingSpec

SPEC = RoutingSpec.uniform(num_sites=2, num_experts=8, top_k=2)


def rows(count: int, first: int = 0) -> np.ndarray:
    """Recognisable rows `[count, 2, 2]`: row r holds 4r, 4r + 1, 4r + 2, 4r + 3."""
    return np.arange(4 * first, 4 * (first + count), dtype=np.uint8).reshape(count, 2, 2)


@pytest.fixture
def stream():
    stream = CpuStream(num_threads=1)
    yield stream
    stream.close()


def output(count=3, segments=(), host_cache=None, slots=None) -> RoutedExpertsOutput:
    slots = torch.arange(count) if slots is None else torch.tensor(slots)
    return RoutedExpertsOutput(slots, torch.from_numpy(rows(count)), host_cache, segments)


def done() -> Event:
    event = Event()
    event.record(None)
    return event


# --- the life of one step's routes ------------------------------------------------------------------------------


def test_finalize_hands_each_request_its_rows(stream):
    a, b = RequestRoutes(SPEC, 4), RequestRoutes(SPEC, 2)
    b.extend(0, rows(1, first=50))
    out = output(3, [RouteSegment(0, 1, 1, b), RouteSegment(1, 3, 0, a)])
    out.copy_to_cpu(stream, done())
    out.finalize()
    assert out.state is RouteState.FINALIZED
    assert np.array_equal(a.take(), rows(2, first=1))
    assert np.array_equal(b.take(), np.concatenate([rows(1, first=50), rows(1)]))


def test_finalize_also_writes_the_host_cache_by_slot(stream):
    cache = np.full((6, 2, 2), 99, np.uint8)
    out = output(3, host_cache=cache, slots=[4, 0, 2])
    out.copy_to_cpu(stream, done())
    out.finalize()
    assert np.array_equal(cache[[4, 0, 2]], rows(3))
    assert (cache[[1, 3, 5]] == 99).all()


def test_finalizing_twice_is_an_error_and_adds_no_rows(stream):
    routes = RequestRoutes(SPEC, 6)
    out = output(3, [RouteSegment(0, 3, 0, routes)])
    out.copy_to_cpu(stream, done())
    out.finalize()
    with pytest.raises(RuntimeError, match="cannot become finalized: they are finalized, not copying"):
        out.finalize()
    assert len(routes.take()) == 3


def test_finalizing_before_the_copy_was_started_is_an_error():
    with pytest.raises(RuntimeError, match="finalized in state captured before their copy was done"):
        output().finalize()


def test_finalizing_before_the_event_is_an_error_and_works_after_it(stream):
    event, routes = Event(), RequestRoutes(SPEC, 3)
    out = output(3, [RouteSegment(0, 3, 0, routes)])
    out.copy_to_cpu(stream, event)
    with pytest.raises(RuntimeError, match="before their copy was done"):
        out.finalize()
    assert len(routes.take()) == 0
    event.record(None)
    out.finalize()
    assert np.array_equal(routes.take(), rows(3))


def test_copying_twice_is_an_error(stream):
    out = output()
    out.copy_to_cpu(stream, done())
    with pytest.raises(RuntimeError, match="cannot become copying: they are copying, not captured"):
        out.copy_to_cpu(stream, done())


def test_a_wrong_transition_names_the_step_and_its_requests():
    routes = RequestRoutes(SPEC, 3)
    segments = [RouteSegment(0, 2, 0, routes, "run/0/a/0"), RouteSegment(2, 3, 0, routes, "run/0/b/1")]
    out = RoutedExpertsOutput(torch.arange(3), torch.from_numpy(rows(3)), None, segments, step=17)
    with pytest.raises(RuntimeError, match=r"step 17 .*run/0/a/0.*run/0/b/1.* finalized in state captured"):
        out.finalize()


def test_steps_finalized_out_of_order_are_an_error(stream):
    """Positions 0-1 belong to the first step and 2 to the second: the second alone would leave a hole."""
    routes = RequestRoutes(SPEC, 3)
    first, second = output(2, [RouteSegment(0, 2, 0, routes)]), output(1, [RouteSegment(0, 1, 2, routes)])
    for out in (first, second):
        out.copy_to_cpu(stream, done())
    with pytest.raises(RuntimeError, match=r"positions 0\.\.2 are missing or doubled"):
        second.finalize()


def test_a_batch_result_waits_for_its_event_before_it_finalizes(stream):
    """The event is recorded by the stream after the copies, so finalize cannot see a row that is not there."""
    gate, routes = threading.Event(), RequestRoutes(SPEC, 2)
    result = GenerationBatchResult(step=0, batch=[])

    def work():
        gate.wait()
        result.routed_experts_output = output(2, [RouteSegment(0, 2, 0, routes)])
        result.copy_to_cpu(stream)

    stream.launch(work, result.copy_done)
    threading.Timer(0.02, gate.set).start()
    result.finalize()
    assert np.array_equal(routes.take(), rows(2))


def test_a_step_that_failed_raises_its_error_when_finalized(stream):
    result = GenerationBatchResult(step=0, batch=[])

    def work():
        raise RuntimeError("expert 3 is on fire")

    stream.launch(work, result.copy_done)
    with pytest.raises(RuntimeError, match="on fire"):
        result.finalize()


# --- the rows of one request ------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 5), max_size=6), slack=st.integers(0, 3))
def test_chunks_add_up_to_the_whole(lengths, slack):
    routes, whole = RequestRoutes(SPEC, sum(lengths) + slack), rows(sum(lengths))
    at = 0
    for length in lengths:
        routes.extend(at, whole[at : at + length])
        at += length
    assert np.array_equal(routes.take(), whole)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_gap_or_a_repetition_is_an_error(start):
    routes = RequestRoutes(SPEC, 5)
    routes.extend(0, rows(2))
    with pytest.raises(RuntimeError, match=f"positions 2..{start} are missing or doubled"):
        routes.extend(start, rows(1))


def test_more_rows_than_the_request_can_have_is_an_error():
    routes = RequestRoutes(SPEC, 2)
    with pytest.raises(ValueError):
        routes.extend(0, rows(3))
    assert len(routes.take()) == 0


def test_a_row_behind_the_last_is_an_error():
    routes = RequestRoutes(SPEC, 2)
    routes.extend(0, rows(2))
    with pytest.raises(ValueError, match=r"positions 2\.\.3, there is room for 2"):
        routes.extend(2, rows(1))
    assert np.array_equal(routes.take(), rows(2))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_rows_of_many_decodes_are_read_in_between(dtype):
    count = 2 * MOST_LATE + 3
    routes, whole = RequestRoutes(SPEC, count), (np.arange(4 * count) % 251).astype(np.uint8).reshape(count, 2, 2)
    buffer = np.empty((1, 2, 2), dtype)
    for row in range(count):
        buffer[:] = whole[row]
        routes.extend(row, buffer)
        assert routes.filled == row + 1
        if row in (0, 1, 7, MOST_LATE - 1, MOST_LATE, MOST_LATE + 1):
            assert np.array_equal(routes.rows(0, row + 1), whole[: row + 1])
            assert np.array_equal(routes.take(), whole[: row + 1])
    buffer[:] = 255
    routes.seal()
    assert np.array_equal(routes.take(), whole)


def test_decodes_and_chunks_keep_their_order():
    routes, whole = RequestRoutes(SPEC, 9), rows(9)
    for start, end in [(0, 1), (1, 2), (2, 5), (5, 6), (6, 6), (6, 8), (8, 9)]:
        routes.extend(start, whole[start:end])
    assert np.array_equal(routes.take(), whole)


@pytest.mark.parametrize("shape", [(1, 3, 2), (4,), (1, 4, 1), (2, 2)])
def test_a_row_of_another_shape_is_never_read_as_one(shape):
    """Also when it has as many bytes."""
    routes = RequestRoutes(SPEC, 4)
    with pytest.raises(ValueError, match=r"a row has \(2, 2\)"):
        routes.extend(0, np.ones(shape, np.uint8))
    assert len(routes.take()) == 0


def test_a_sealed_request_ignores_late_rows():
    routes = RequestRoutes(SPEC, 4)
    routes.extend(0, rows(2))
    routes.seal()
    routes.extend(2, rows(1, first=9))
    routes.extend(7, rows(1, first=9))
    assert np.array_equal(routes.take(), rows(2))


def test_rows_of_a_request_are_its_own():
    """A buffer that is written again later changes nothing (sglang#34319)."""
    routes, buffer = RequestRoutes(SPEC, 2), rows(2).copy()
    routes.extend(0, buffer)
    buffer[:] = 77
    assert np.array_equal(routes.take(), rows(2))


def test_a_request_that_ended_early_keeps_no_slack_in_memory():
    routes = RequestRoutes(SPEC, 1000)
    routes.extend(0, rows(2))
    taken = routes.take()
    assert taken.base is None
    assert (taken.shape, taken.dtype) == ((2, 2, 2), np.uint8)
