"""Where groups of ranks are placed: what is reserved for them, what is refused, and that nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.dispatch import Limits
from actors.placement import check_groups
from actors.pool import ActorPool
from tests.actors.fakes import FakeBackend, make_requests
from tests.actors.waiting import eventually

ROOT = Path(__file__).parents[2]
NODES = [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 8.0, "memory": 1e9}]


@pytest.mark.parametrize(
    ("groups", "dp_size", "rank", "message"),
    [
        (3, 4, {"CPU": 1.0}, None),  # one on the first node, two on the second
        (4, 4, {"CPU": 1.0}, "needs 4 CPU on one node: the cluster has room for 3, not for num_actors=4"),
        (1, 9, {"CPU": 1.0}, "needs 9 CPU on one node, the largest node has 8 CPU; lower dp_size"),
        (1, 2, {"CPU": 1.0, "GPU": 1.0}, "needs 2 CPU, 2 GPU on one node, the largest node has 1 GPU;"),
        (1, 1, {"CPU": 5.0, "GPU": 1.0}, "no node has all of it, at most 8 CPU, 1 GPU"),
        (1, 2, {"TPU": 0.5}, "needs 1 TPU on one node, the largest node has 0 TPU"),
        (3, 10, {"CPU": 0.4}, None),
    ],
)
def test_groups_must_fit_on_single_nodes(
    groups: int, dp_size: int, rank: dict[str, float], message: str | None
) -> None:
    if message is None:
        check_groups(groups, dp_size, rank, NODES)
    else:
        with pytest.raises(ValueError, match=message):
            check_groups(groups, dp_size, rank, NODES)


def fake_group(model: str, *, dp_size: int, **options: Any) -> FakeBackend:
    return FakeBackend(model, **options)


def pool_of(num_actors: int, dp_size: int, num_cpus: float, **limits: float) -> ActorPool:
    return ActorPool(
        "model",
        num_actors=num_actors,
        engine_options={"dp_size": dp_size},
        num_cpus=num_cpus,
        backend_factory=fake_group,
        limits=Limits(chunk_samples=2, outstanding_chunks=2, **limits),  # type: ignore[arg-type]
    )


def groups_in(state: str) -> list[dict[str, Any]]:
    from ray.util.placement_group import placement_group_table

    return [group for group in placement_group_table().values() if group["state"] == state]


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
def test_a_bundle_per_rank_is_reserved_on_one_node_and_given_back() -> None:
    import ray

    pool = pool_of(2, dp_size=2, num_cpus=0.5)
    placed = groups_in("CREATED")
    assert [list(group["bundles"].values()) for group in placed] == [[{"CPU": 0.5}] * 2] * 2
    assert {group["strategy"] for group in placed} == {"STRICT_PACK"}
    assert eventually(lambda: ray.available_resources().get("CPU", 0.0) == 0.0)
    requests = make_requests(3, 2)
    assert sum(len(finished.traces()) for finished in pool.stream(requests)) == 6
    pool.close()
    assert eventually(lambda: ray.available_resources().get("CPU", 0.0) == 2.0)
    assert eventually(lambda: not groups_in("CREATED"))


@pytest.mark.usefixtures("cluster")
def test_what_the_cluster_can_never_hold_is_refused_at_once() -> None:
    with pytest.raises(
        ValueError,
        match="a group of dp_size=4 ranks with 1 CPU each needs 4 CPU on one node, the largest node has 2 CPU",
    ):
        pool_of(1, dp_size=4, num_cpus=1)
    with pytest.raises(ValueError, match="the cluster has room for 1, not for num_actors=2"):
        pool_of(2, dp_size=2, num_cpus=1)
    assert not groups_in("CREATED") + groups_in("PENDING")


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
def test_a_group_gives_up_when_others_hold_what_it_needs() -> None:
    other = pool_of(1, dp_size=2, num_cpus=0.5)
    with pytest.raises(
        RuntimeError,
        match=r"no node had 2 CPU free for a group of dp_size=2 within 1 s; the whole cluster has 1 CPU free, its "
        "largest node 2 CPU in all",
    ):
        pool_of(1, dp_size=2, num_cpus=1, placement_seconds=1)
    other.close()
    assert eventually(lambda: not groups_in("CREATED") + groups_in("PENDING"))


@pytest.mark.chaos
@pytest.mark.parametrize("another", [True, False], ids=["another node", "no other node"])
def test_a_group_whose_node_is_lost_moves_to_another_or_gives_up_in_time(another: bool) -> None:
    command = [sys.executable, "-m", "tests.actors.lost_node", *(["--another"] if another else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=240
    ).stdout
    found = json.loads(next(line for line in output.splitlines() if line.startswith('{"samples"')))
    if another:
        assert found == {"samples": 20, "different": 20, "error": None}
    else:
        assert found["error"].startswith("RuntimeError: no node had 2 CPU free for a group of dp_size=2 within 10 s")
        assert 0 < found["samples"] == found["different"] < 20


def test_the_limits_of_an_engine_take_options_as_text() -> None:
    assert Limits.for_engine({"dp_size": "2", "max_running_requests": "64"}) == Limits(chunk_samples=32)
