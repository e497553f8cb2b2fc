"""The state that a group of ranks is to be in, also when it is started anew: weights, at rest or not, asleep or not."""

from __future__ import annotations

from typing import NamedTuple

from rollout.group_weights import SavedWeights
from rollout.rank_link import RankSet


class GroupState(NamedTuple):
    """By default that of ranks that have just loaded their checkpoint.

    >>> GroupState()._replace(paused=True)
    GroupState(weights=None, paused=True, asleep=0)

    Attributes:
        weights: of the last update; None for the checkpoint's.
        asleep: the level, 0 when awake.
    """

    weights: SavedWeights | None = None
    paused: bool = False
    asleep: int = 0

    def same(self, other: GroupState) -> bool:
        """Whether it is the same; a directory that was read twice may have changed in between."""
        return self.weights is other.weights and self[1:] == other[1:]


def bring(ranks: RankSet, have: GroupState, want: GroupState) -> bool:
    """Take ranks without requests from one state to another; False when only new ranks get there.

    Raises:
        RankDiedError: a rank died.
        Exception: a rank refused, such as weights that are no longer where they were.
    """
    if have.asleep or (have.weights is not None and want.weights is None):
        return False
    if want.weights is not None and want.weights is not have.weights:
        ranks.ask("stage", *want.weights.where, want.weights.version, True, False)
        ranks.ask("apply", "keep", "keep")
    if want.paused != have.paused:
        ranks.ask(*(("pause", "keep") if want.paused else ("resume",)))
    if want.asleep:
        ranks.ask("sleep", want.asleep, "abort")
    return True
