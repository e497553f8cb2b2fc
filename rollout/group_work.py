"""Which rank of a group has which requests. What a dead group had goes to the ranks of the next one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rollout.backend import SampleRequest
from rollout.group_stream import GroupStream
from rollout.rank_link import RankSet
from rollout.rank_messages import Ended


class Given(NamedTuple):
    """A request that a rank has."""

    request: SampleRequest
    stream: GroupStream
    rank: int

    @property
    def cost(self) -> int:
        """Tokens that it may take."""
        return len(self.request.prompt_ids) + self.request.sampling_params.max_tokens


class GroupWork:
    """The requests that have not ended, by number. Its owner's lock guards it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers = itertools.count()
        self._given: dict[int, Given] = {}
        self._ended: set[int] = set()

    def __len__(self) -> int:
        return len(self._given)

    def add(self, requests: Sequence[SampleRequest], stream: GroupStream, ranks: RankSet | None) -> list[int]:
        """Give each request to the rank with the fewest outstanding tokens; without ranks they wait. Their numbers."""
        given = self._assign((next(self._numbers), request, stream) for request in requests)
        self._send(ranks, given)
        return list(given)

    def end(self, numbers: Iterable[int], ranks: RankSet | None) -> None:
        """Abort requests; those that have ended meanwhile are left alone."""
        ending = self._given.keys() & set(numbers)
        self._ended |= ending
        self._send_ends(ranks, ending)

    def arrived(self, ended: Ended) -> bool:
        """Hand a sample to its stream; False when it had arrived before, from ranks that died since."""
        given = self._given.pop(ended.ticket, None)
        self._ended.discard(ended.ticket)
        if given is not None:
            given.stream.put(ended)
        return given is not None

    def give_all(self, ranks: RankSet) -> None:
        """Let new ranks sample, or end, what the old ones had not delivered."""
        missing, self._given = self._given, {}
        self._send(ranks, self._assign((number, given.request, given.stream) for number, given in missing.items()))
        self._send_ends(ranks, self._ended)

    def fail(self, error: BaseException) -> None:
        """Nothing will arrive any more: every stream that waits is told why."""
        for stream in {id(given.stream): given.stream for given in self._given.values()}.values():
            stream.put(error)
        self._given.clear()

    def _assign(self, requests: Iterable[tuple[int, SampleRequest, GroupStream]]) -> dict[int, Given]:
        load = [0] * self._size
        for given in self._given.values():
            load[given.rank] += given.cost
        added = {}
        for number, request, stream in requests:
            added[number] = given = Given(request, stream, load.index(min(load)))
            load[given.rank] += given.cost
        self._given |= added
        return added

    def _send(self, ranks: RankSet | None, given: dict[int, Given]) -> None:
        work: dict[int, list[tuple[int, SampleRequest]]] = {}
        for number, (request, _, rank) in given.items():
            work.setdefault(rank, []).append((number, request))
        if work and ranks is not None:
            ranks.tell("submit", {rank: (tickets,) for rank, tickets in work.items()})

    def _send_ends(self, ranks: RankSet | None, numbers: Iterable[int]) -> None:
        where: dict[int, list[int]] = {}
        for number in sorted(numbers):
            where.setdefault(self._given[number].rank, []).append(number)
        if where and ranks is not None:
            ranks.tell("end", {rank: (numbers,) for rank, numbers in where.items()})
