"""Inputs of a decode step that were made from those of the step before are those planned from its requests."""

from __future__ import annotations

import dataclasses
import gc
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout import RolloutClient, SamplingParams
from rollout.request import Request
from rollout.request_routes import RequestRoutes
from rollout.scheduler import Work
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
        engine, self.scheduler, _ = parts_of(client)
        self.runner = engine._runner
        self.followed: list[bool] = []
        """Of each step, whether it was made from the one before."""
        self.moves = 0
        self._prepare, self._plan, self._move = self.runner.prepare, self.runner._plan, self.runner.move_slots
        self._planned = False
        self.runner.prepare, self.runner._plan, self.runner.move_slots = self.prepare, self.plan, self.move

    @property
    def mostly_followed(self) -> bool:
        """More than a third of the steps were."""
        return sum(self.followed) > len(self.followed) // 3

    def plan(self, batch: list[Work], rows: int | None) -> Any:
        self._planned = True
        return self._plan(batch, rows)

    def move(self, *place: int) -> None:
        self.moves += 1
        self._move(*place)

    def prepare(self, batch: list[Work], rows: int | None = None) -> Any:
        self._planned = False
        sources = [work.request.source for work in batch]
        found = self._prepare(batch, rows)
        self.followed.append(not self._planned)
        for work, source in zip(batch, sources, strict=True):
            work.request.source = source  # planning takes it
        assert_equal(found, self._plan(batch, rows), f"step {len(self.followed)}")
        return found


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[RolloutClient]:
    with RolloutClient.local(MODEL_PATH, num_threads=1, **request.param) as client:
        if client.backend._built.runner.native is None:  # type: ignore[attr-defined]
            pytest.skip("no compiler: every step is planned")
        yield client


PLAIN: dict[str, Any] = {"max_running_requests": 4}
PADDED = {**PLAIN, "batch_invariant": True}
CACHED = {**PLAIN, "prefix_cache": True}
MOVED = {**PLAIN, "kv_tokens": 100}
CROWDED = {**PLAIN, "kv_tokens": 48, "max_batch_tokens": 16}


def sampled(client: RolloutClient) -> Compared:
    """Six requests of different lengths, each prompt twice."""
    compared = Compared(client)
    params = [SamplingParams(max_tokens=6 + 3 * i, ignore_eos=True, seed=i, top_p=1 - i / 10) for i in range(6)]
    client.sample(prompts(3) * 2, sampling_params=params)
    assert not all(compared.followed[1:])
    return compared


@pytest.mark.parametrize("client", [PLAIN, PADDED, CACHED], indirect=True, ids=["plain", "padded", "cached"])
def test_a_step_made_from_the_one_before_is_the_one_planned_from_its_requests(client: RolloutClient) -> None:
    assert sampled(client).mostly_followed


@pytest.mark.parametrize("client", [MOVED], indirect=True)
def test_requests_that_move_are_read_at_their_new_slots(client: RolloutClient) -> None:
    compared = sampled(client)
    assert compared.mostly_followed
    assert compared.moves > 0


@pytest.mark.parametrize("client", [CROWDED], indirect=True)
def test_requests_that_yield_come_back_in_a_step_that_is_planned(client: RolloutClient) -> None:
    compared = sampled(client)
    assert compared.mostly_followed
    assert compared.scheduler.preemptions > 0


@pytest.mark.parametrize("client", [PLAIN], indirect=True)
@pytest.mark.parametrize(
    "options", [{"logprobs": 2}, {"repetition_penalty": 1.3}, {"bad_words": [[5]]}, {"logit_bias": {4: 1.0}}]
)
def test_a_draw_that_needs_more_is_planned_from_its_request(client: RolloutClient, options: dict[str, Any]) -> None:
    compared = Compared(client)
    client.sample(prompts(3), sampling_params=greedy(8, **options))
    assert not any(compared.followed)


def reachable(root: object) -> list[object]:
    """What `root` keeps alive, but for code and torch's own objects."""
    found, left = {id(root): root}, [root]
    while left:
        for each in gc.get_referents(left.pop()):
            is_code = isinstance(each, (type, types.ModuleType, types.FunctionType, torch.Tensor, torch.nn.Module))
            if id(each) not in found and not is_code:
                found[id(each)] = each
                left.append(each)
    return list(found.values())


@pytest.mark.parametrize("client", [PLAIN], indirect=True)
def test_nothing_of_a_request_that_ended_is_kept(client: RolloutClient) -> None:
    seen: list[Any] = []
    runner = parts_of(client)[0]._runner
    prepare = runner.prepare
    runner.prepare = lambda batch, rows=None: seen.append(prepare(batch, rows)) or seen[-1]
    client.sample(prompts(3), sampling_params=greedy(8))
    ended = (Work, Request, RequestRoutes)
    assert any(isinstance(each, ended) for each in reachable(seen[-1]))
    assert not any(isinstance(each, ended) for each in reachable(runner._decodes))


@pytest.mark.parametrize("client", [PLAIN], indirect=True)
def test_only_the_same_requests_one_position_further_follow(client: RolloutClient) -> None:
    batches: list[list[Work]] = []
    runner = parts_of(client)[0]._runner
    prepare = runner.prepare
    runner.prepare = lambda batch, rows=None: batches.append(batch) or prepare(batch, rows)
    client.sample(prompts(1), sampling_params=greedy(8))
    step, ended = runner._decodes, batches[-1][0]
    work = ended._replace(start=ended.start + 1, request=replace(ended.request, row=step.places[0][1]))
    assert step.next([work], None) is not None
    assert step.next([work], rows=1) is not None
    for change in ({"arrival": 77}, {"row": 3}, {"slot": 64}):
        assert step.next([work._replace(request=replace(work.request, **change))], None) is None
    read_from_host = replace(work.request)
    read_from_host.known = work.start + 1
    assert step.next([work._replace(request=read_from_host)], None) is None
    for other in (ended, work._replace(start=work.start + 1), work._replace(samples=False)):
        assert step.next([other], None) is None
    assert step.next([work, work], None) is None
    assert step.next([work], rows=32) is None
