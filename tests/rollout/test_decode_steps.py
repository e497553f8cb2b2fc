"""Inputs of a decode step that were made from those of the step before are those planned from its requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from tests.rollout.probes import greedy, parts_of


def prompts(count: int) -> list[list[int]]:
    """Different ones of five tokens."""
    return [[3 + (7 * i + 5 * j) % 12 for j in range(5)] for i in range(count)]


def assert_equal(found: Any, expected: Any, at: str) -> None:
    """Field by field, value by value."""
    assert type(found) is type(expected), at
    if isinstance(found, torch.Tensor):
        assert found.dtype is expected.dtype, at
        assert torch.equal(found, expected), at
    elif dataclasses.is_dataclass(found):
        for field in dataclasses.fields(found):
            assert_equal(getattr(found, field.name), getattr(expected, field.name), f"{at}.{field.name}")
    elif isinstance(found, (list, tuple)):
        assert len(found) == len(expected), at
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_equal(one, other, f"{at}[{index}]")
    elif isinstance(found, dict):
        assert_equal(sorted(found.items()), sorted(expected.items()), at)
    else:
        assert found == expected, at


class Compared:
    """Plans each step of a client's engine anew, too."""

    def __init__(self, client: RolloutClient) -> None:
        self.runner = parts_of(client)[0]._runner
        self.prepare = self.runner.prepare
        self.runner.prepare = self
        self.followed: list[bool] = []
        """Of each step, whether it was made from the one before."""

    def __call__(self, batch: list[Any], rows: int | None = None) -> Any:
        before = self.runner._decodes
        follows = before is not None and before.next(batch, rows) is not None
        found = self.prepare(batch, rows)
        self.followed.append(follows)
        if follows:
            assert_equal(found, self.runner._plan(batch, rows), f"step {len(self.followed)}")
        return found


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[RolloutClient]:
    with RolloutClient.local(MODEL_PATH, num_threads=1, **request.param) as client:
        if client.backend._built.runner.native is None:  # type: ignore[attr-defined]
            pytest.skip("no compiler: every step is planned")
        yield client


PLAIN: dict[str, Any] = {"max_running_requests": 4}
PADDED = {**PLAIN, "batch_invariant": True}
CROWDED = {**PLAIN, "kv_tokens": 48, "max_batch_tokens": 16}  # requests grow, move, yield and come back


@pytest.mark.parametrize("client", [PLAIN, PADDED, CROWDED], indirect=True, ids=["plain", "padded", "crowded"])
def test_a_step_made_from_the_one_before_is_the_one_planned_from_its_requests(client: RolloutClient) -> None:
    compared = Compared(client)
    params = [SamplingParams(max_tokens=6 + 3 * i, ignore_eos=True, seed=i, top_p=1 - i / 10) for i in range(6)]
    client.sample(prompts(6), sampling_params=params)
    assert sum(compared.followed) > len(compared.followed) // 3
    assert not all(compared.followed[1:])


@pytest.mark.parametrize("client", [PLAIN], indirect=True)
@pytest.mark.parametrize(
    "options", [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"bad_words": [[5]]}, {"logit_bias": {4: 1.0}}]
)
def test_a_draw_that_needs_more_is_planned_from_its_request(client: RolloutClient, options: dict[str, Any]) -> None:
    compared = Compared(client)
    client.sample(prompts(3), sampling_params=greedy(8, **options))
    assert not any(compared.followed)


@pytest.mark.parametrize("client", [PLAIN], indirect=True)
def test_nothing_of_a_request_that_ended_is_kept(client: RolloutClient) -> None:
    client.sample(prompts(3), sampling_params=greedy(8))
    kept = parts_of(client)[0]._runner._decodes
    assert kept is not None
    assert kept.forward.segments == []
    assert kept.forward.spans == []


@pytest.mark.parametrize("client", [PLAIN], indirect=True)
def test_another_request_in_the_same_place_does_not_follow(client: RolloutClient) -> None:
    """Same row, slots and positions, in the step right behind: only who it is differs."""
    batches: list[Any] = []
    runner = parts_of(client)[0]._runner
    prepare = runner.prepare
    runner.prepare = lambda batch, rows=None: batches.append(batch) or prepare(batch, rows)
    client.sample(prompts(1), sampling_params=greedy(8))
    step = runner._decodes
    work = batches[-1][0]
    following = work._replace(start=work.start + 1)
    for change in ({}, {"arrival": 77}, {"row": 3}, {"slot": 64}):
        request = dataclasses.replace(work.request, **{"row": step.places[0][1], **change})
        assert (step.next([following._replace(request=request)], None) is None) == bool(change)
    assert step.next([following, following], None) is None
    assert step.next([following], 32) is None
