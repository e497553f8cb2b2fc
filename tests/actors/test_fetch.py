"""actors.fetch: each trainer brings its own tables out of the object store, and the driver none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

import actors
from actors.trainer_side import rank_indices
from rollout.backend import SampleRequest
from storage import ReplayBatch
from storage.schema import to_table
from tests.actors.fakes import SPEC, expected_trace, make_requests

REQUESTS = make_requests(3, 2)


def table_of(start: int, end: int) -> Any:
    return to_table([replace(expected_trace(request), metadata={}) for request in REQUESTS[start:end]], SPEC)


@ray.remote(num_cpus=0)
def sampled(start: int, end: int) -> Any:
    """A table as a generator actor makes it, in another process than driver and trainers."""
    return table_of(start, end)


def expected_rows(request: SampleRequest) -> np.ndarray:
    """The five rows of its inputs and zeros for the last sampled token."""
    return np.pad(expected_trace(request).routed_experts, ((0, 1), (0, 0), (0, 0)))


@ray.remote(num_cpus=0)
def broken() -> Any:
    raise ValueError("of the other rank, must not be fetched")


@ray.remote(num_cpus=0)
class Trainer:
    """Fetches and collates; counts the bytes of every table that ray.get returns in this process."""

    def batch(self, refs: list[Any], **options: Any) -> tuple[int, list[str], Any]:
        fetched: list[int] = []
        original = ray.get

        def counting(wanted: Any) -> Any:
            got = original(wanted)
            fetched.extend(table.nbytes for table in got)
            return got

        ray.get = counting
        try:
            traces = actors.fetch(refs, **options)
        finally:
            ray.get = original
        batch = ReplayBatch.collate(traces, spec=SPEC)
        return sum(fetched), batch.sample_ids, batch.routed_experts


@pytest.mark.usefixtures("cluster")
@pytest.mark.full
def test_two_trainers_fetch_the_bytes_of_their_own_tables_and_the_driver_none() -> None:
    spans = [(0, 1), (1, 3), (3, 4), (4, 6)]
    refs = [sampled.remote(*span) for span in spans]
    trainers = [Trainer.remote() for _ in range(2)]
    answers = [trainer.batch.remote(refs, dp_rank=rank, dp_size=2) for rank, trainer in enumerate(trainers)]
    ready, _ = ray.wait(answers, num_returns=2, timeout=60, fetch_local=False)
    assert len(ready) == 2  # both are done before this process gets its first object
    for rank, (fetched, sample_ids, routes) in enumerate(ray.get(answers)):
        own = REQUESTS[3 * rank : 3 * rank + 3]
        assert sample_ids == [request.sample_id for request in own]
        assert np.array_equal(routes, np.stack([expected_rows(request) for request in own]))
        assert fetched == sum(table_of(*span).nbytes for span in spans[2 * rank : 2 * rank + 2])


@pytest.mark.usefixtures("cluster")
def test_objects_of_other_ranks_are_not_asked_for_and_own_errors_keep_their_type() -> None:
    refs = [sampled.remote(0, 2), broken.remote()]
    assert len(actors.fetch(refs, dp_rank=0, dp_size=2)) == 2
    with pytest.raises(ValueError, match="of the other rank"):
        actors.fetch(refs, dp_rank=1, dp_size=2)


@pytest.mark.usefixtures("cluster")
def test_a_reference_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"refs\[0\] holds a int, need a table of traces"):
        actors.fetch([ray.put(3)], dp_rank=0, dp_size=1)


def test_sizes_balance_the_ranks() -> None:
    assert [rank_indices(4, rank, 2, [9, 1, 5, 3]) for rank in range(2)] == [[0], [1, 2, 3]]
    assert [rank_indices(5, rank, 2) for rank in range(2)] == [[0, 1, 2], [3, 4]]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_every_reference_has_one_rank_and_no_rank_exceeds_another_by_more_than_one_table(
    sizes: list[int], ranks: int
) -> None:
    if len(sizes) < ranks:
        return
    owned = [rank_indices(len(sizes), rank, ranks, sizes) for rank in range(ranks)]
    assert sorted(index for indices in owned for index in indices) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in indices) for indices in owned]
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 2, 2), "dp: rank 2 of 2 does not exist"),
        ((1, 0, 2), "1 references cannot be split over 2 ranks"),
        ((2, 0, 2, [1]), "sizes has 1 entries for 2 references"),
        ((2, 0, 2, [1, 0]), r"sizes\[1\] is 0; need 1 or more"),
    ],
)
def test_refusals(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_indices(*arguments)
