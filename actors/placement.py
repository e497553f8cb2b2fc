"""Where an actor may run: anywhere, or, when its engine is a group of ranks, where room for all of them is reserved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.remote import check_resources

ROUNDING = 1e-9
"""Ray adds and subtracts fractions of a CPU as floats."""


class Placement(Protocol):
    """The place of one slot of the pool, for each actor that fills it."""

    def begin(self) -> dict[str, Any]:
        """Options of an actor that is started now."""

    def check(self) -> None:
        """Raises RuntimeError when the actor begun last has waited too long for its place."""

    def remove(self) -> None:
        """Give the place back."""


class Anywhere:
    """Of an actor that asks for its own resources; see `Placement`."""

    def begin(self) -> dict[str, Any]:
        """See Placement."""
        return {}

    def check(self) -> None:
        """See Placement. Another job may end at any time, so an actor waits for it; the pool logs that."""

    def remove(self) -> None:
        """See Placement."""


class Reserved:
    """One bundle for each rank of a group, all on one node.

    STRICT_PACK, since the ranks are child processes of the actor: they meet in a file and talk to it over pipes, which
    end at the node. One bundle per rank rather than one for all shows in `ray status` what the group is made of,
    and is where a rank that is an actor of its own would go. The actor takes the first: it computes nothing itself.

    Args:
        rank: resources of one rank, all above 0.
        seconds: how long to wait until they are free.
        clock: seconds, for tests.
    """

    def __init__(
        self, dp_size: int, rank: Mapping[str, float], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dp_size, self._rank, self._seconds, self._clock = dp_size, rank, seconds, clock
        self._placed, self._deadline = False, 0.0
        self.group: PlacementGroup = placement_group([dict(rank)] * dp_size, strategy="STRICT_PACK")

    def begin(self) -> dict[str, Any]:
        """See Placement. Ray finds the bundles another node when theirs is gone, so each actor waits anew."""
        self._placed, self._deadline = False, self._clock() + self._seconds
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)}

    def check(self) -> None:
        """See Placement."""
        if self._placed or self._clock() < self._deadline:
            return
        if placement_group_table(self.group)["state"] == "CREATED":
            self._placed = True
            return
        raise RuntimeError(
            f"no node had {_named(_of_group(self._dp_size, self._rank))} free for a group of dp_size={self._dp_size} "
            f"within {self._seconds:g} s; the whole cluster has {_named(ray.available_resources(), self._rank)} free, "
            f"its largest node {_named(_largest(_nodes(), self._rank))} in all; see `ray status`"
        )

    def remove(self) -> None:
        """See Placement."""
        remove_placement_group(self.group)


def place(num_actors: int, dp_size: int, resources: Mapping[str, float], seconds: float) -> list[Placement]:
    """Places for `num_actors` engines of `dp_size` ranks with `resources` each.

    Raises:
        ValueError: the cluster can never hold them; naming what is asked and what there is.
    """
    asked = {name: amount for name, amount in resources.items() if amount > 0}
    if dp_size == 1 or not asked:
        check_resources(num_actors, resources)
        return [Anywhere() for _ in range(num_actors)]
    check_groups(num_actors, dp_size, asked, _nodes())
    return [Reserved(dp_size, asked, seconds) for _ in range(num_actors)]


def check_groups(
    num_groups: int, dp_size: int, rank: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> None:
    """Whether nodes with these resources can hold the groups, each on one node.

    Raises:
        ValueError: naming what a group needs, and what the largest node has or how many groups there is room for.
    """
    need = _of_group(dp_size, rank)
    room = sum(_room(node, need) for node in nodes)
    if room >= num_groups:
        return
    group = f"a group of dp_size={dp_size} ranks with {_named(rank)} each needs {_named(need)} on one node"
    if room:
        raise ValueError(
            f"{group}: the cluster has room for {room}, not for num_actors={num_groups}; lower num_actors, or ask less "
            "per rank (num_cpus=0.5, say)"
        )
    largest = _largest(nodes, rank)
    short = {name: amount for name, amount in largest.items() if amount + ROUNDING < need[name]}
    has = f"the largest node has {_named(short)}" if short else f"no node has all of it, at most {_named(largest)}"
    raise ValueError(f"{group}, {has}; lower dp_size, or ask less per rank (num_cpus=0.5, say)")


def _nodes() -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _of_group(dp_size: int, rank: Mapping[str, float]) -> dict[str, float]:
    return {name: dp_size * amount for name, amount in rank.items()}


def _room(node: Mapping[str, float], need: Mapping[str, float]) -> int:
    return min(int((node.get(name, 0.0) + ROUNDING) // amount) for name, amount in need.items())


def _largest(nodes: Sequence[Mapping[str, float]], names: Mapping[str, float]) -> dict[str, float]:
    return {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in names}


def _named(resources: Mapping[str, float], names: Mapping[str, float] | None = None) -> str:
    """`4 CPU, 2 GPU`."""
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in names or resources)
