"""Ranks that step together: before each step they agree on its shape, on the host, while the step before it runs.

One small collective per turn of the engine's loop, over a CPU group of its own, so that it never meets those of a
forward. Every rank tells how many tokens it has; a rank without any joins with a padded row, since the others need its
experts. When no rank has anything to do, all rest at the same turn, until whoever feeds them calls `wake` on each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from rollout.parallel import Layout, RankGroup, StepShape, join_group


@dataclass(frozen=True)
class Membership:
    """Which rank of which group an engine is.

    >>> Membership(rank=0, size=2, layout="alltoall", init_method="file:///tmp/run/rendezvous")

    Attributes:
        init_method: where the ranks meet; a new one for each start of a group.
        timeout_s: how long a collective may take.
        graph_batches: when every rank only decodes, all are padded to the smallest of these sizes that holds the
            largest count, as under a captured graph.

    Raises:
        ValueError: for a rank, size or layout that cannot be.
    """

    rank: int
    size: int
    layout: Layout
    init_method: str
    timeout_s: float = 60.0
    graph_batches: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a group of {self.size} ranks")
        if self.layout not in ("allgather", "alltoall"):
            raise ValueError(f"moe_dispatch is {self.layout!r}, need 'allgather' or 'alltoall'")
        if not self.timeout_s > 0:
            raise ValueError(f"collective timeout is {self.timeout_s!r} s, need more than 0")


class Turn(NamedTuple):
    """What one rank tells the others; a yes or no is 1 or 0.

    Attributes:
        tokens: real tokens of its next step.
        rows: the same with its own padding.
        decodes: it computes no prompt, so the step may run under a graph.
        busy: it has something to do now or later without being fed.
        epoch: of the last `wake` it saw.
        pending: an update of the weights waits.
        ready: it could be carried out behind this step.
    """

    tokens: int
    rows: int
    decodes: int
    busy: int
    epoch: int = 0
    pending: int = 0
    ready: int = 0


class Lockstep:
    """One rank's part in the agreements of its group. `ranks` is the group as the model's forward sees it.

    `agree` and `gather` are collectives: every rank calls them equally often.
    """

    def __init__(self, ranks: RankGroup, control: RankGroup, graph_batches: tuple[int, ...] = ()) -> None:
        self.ranks = ranks
        self._control = control
        self._graph_batches = sorted(graph_batches)
        self._epoch = 0
        self._idle_since = -1
        self._pending = self._ready = self._agreed = False

    @classmethod
    def join(cls, member: Membership) -> Lockstep:
        """Join the group; raises CollectiveError when not all ranks come in time."""
        model, control = join_group(member.rank, member.size, member.init_method, member.timeout_s)
        place = member.rank, member.size, member.layout
        return cls(RankGroup(*place, model), RankGroup(*place, control), member.graph_batches)

    @property
    def seconds(self) -> float:
        """What the agreements took, waiting for the other ranks included."""
        return self._control.seconds

    @property
    def idle(self) -> bool:
        """All ranks agreed that nobody has work, and nothing came since."""
        return self._idle_since == self._epoch and not self._pending

    def wake(self, epoch: int) -> None:
        """Some rank was fed; every rank is told, with the same number, above all before."""
        self._epoch = epoch

    def agree(self, step: int, turn: Turn) -> StepShape | None:
        """The shape of step `step`, None when no rank has a token. Waits for all ranks."""
        self._control.step = step
        mine = turn._replace(epoch=self._epoch, pending=self._pending, ready=self._ready)
        told = self._control.all_gather_ints(mine, "the agreement on the next step")
        turns = [Turn(*values) for values in told]
        self._agreed = all(turn.ready for turn in turns)
        if not any(turn.busy or turn.pending for turn in turns) and len({turn.epoch for turn in turns}) == 1:
            self._idle_since = self._epoch
        if not any(turn.tokens for turn in turns):
            return None
        return StepShape(
            num_tokens=tuple(turn.tokens for turn in turns),
            graph_batch=self._graph_batch(turns),
            padded=tuple(turn.rows for turn in turns),
        )

    def _graph_batch(self, turns: list[Turn]) -> int | None:
        largest = max(turn.rows for turn in turns)
        if not all(turn.decodes for turn in turns):
            return None
        return next((size for size in self._graph_batches if size >= largest), None)

    def may_change(self, ready: bool) -> bool:
        """Whether every rank carries out its waiting update now. `ready` is told with the next agreement."""
        self._pending, self._ready = True, ready
        return self._agreed

    def changed(self) -> None:
        """The update is done."""
        self._pending = self._ready = self._agreed = False

    def compare(self, facts: dict[str, str], what: str) -> None:
        """Whether every rank was started alike.

        Raises:
            ValueError: on all ranks, naming the ranks that differ from rank 0, and in what.
        """
        told = self._control.all_gather_ints([_hash(value) for value in facts.values()], f"the comparison of {what}")
        different = {
            rank: [name for name, one, other in zip(facts, told[0], hashes, strict=True) if one != other]
            for rank, hashes in enumerate(told)
        }
        problems = [f"rank {rank} has another {' and '.join(names)}" for rank, names in different.items() if names]
        if problems:
            named = {name: facts[name] for names in different.values() for name in names}
            raise ValueError(
                f"the ranks of a group must be started alike: {'; '.join(problems)} than rank 0. "
                f"Rank {self.ranks.rank} has {named}"
            )

    def leave(self) -> None:
        """Give up the connections to the other ranks."""
        dist.destroy_process_group()


def _hash(value: str) -> int:
    return int.from_bytes(hashlib.sha256(value.encode()).digest()[:7])
