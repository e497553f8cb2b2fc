"""Prefixes whose keys and values are still in the pool, found by their tokens; an update of the weights forgets all.

A hit copies slots into the request's own run: the copy is exact, every run stays contiguous, so that decodes keep
their strided attention, and no run is shared, so that none has to be counted. A prefix is either the beginning of a
running request, as far as it was launched, or what an ended request left. Its routes belong to it and are found with
it; they never move on their own (sglang#26975).

    pool:  [ running request ][ left prefix ][ free ][ running request ] ...
                 ^ moves with its request          ^ evicted, the least recently used first, when slots are needed

Tokens are kept as big-endian bytes in one sorted list: the longest common prefix of a sequence with any of them is that
with one of its two neighbours.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rollout.request import Request
from rollout.request_routes import RequestRoutes


@dataclass(eq=False)
class Prefix:
    """Tokens in consecutive slots. While its `owner` runs, the owner's place and progress count."""

    key: bytes
    slot: int
    capacity: int
    length: int
    routes: RequestRoutes | None
    owner: Request | None = None
    used: int = 0

    @property
    def place(self) -> int:
        """The first slot."""
        return self.slot if self.owner is None else self.owner.slot

    @property
    def ready(self) -> int:
        """Tokens that steps launched before this one have computed."""
        return self.length if self.owner is None else self.owner.ready


class Hit(NamedTuple):
    """The first `length` tokens of a request are those of `prefix`; `pending` when more of them will be soon."""

    prefix: Prefix
    length: int
    pending: bool


class PrefixCache:
    """Which prefixes are in the pool. Who owns which slots is the scheduler's affair.

    >>> cache = PrefixCache()
    >>> cache.begin(request)              # of the tokens 5 7 9 11
    >>> cache.find(another)               # of 5 7 9 8, while the first step of the other was not launched
    Hit(prefix=..., length=0, pending=True)
    """

    def __init__(self) -> None:
        self._sorted: list[Prefix] = []
        self._owned: dict[Request, Prefix] = {}
        self._clock = 0

    def left(self) -> list[Prefix]:
        """Prefixes without an owner."""
        return [prefix for prefix in self._sorted if prefix.owner is None]

    def begin(self, request: Request) -> None:
        """A request was admitted: others may copy what it computes of its known tokens."""
        prefix = Prefix(_key(request.tokens(0, request.known)), 0, 0, 0, request.routes, owner=request)
        self._owned[request] = prefix
        self._insert(prefix)

    def end(self, request: Request, keep: bool) -> bool:
        """A request gives up its slots: True when what it computed stays in them, where others find it.

        Not when an update came between, when it is not to be kept, or when another prefix holds the same tokens.
        """
        prefix = self._owned.pop(request, None)
        if prefix is None:
            return False
        self._sorted.remove(prefix)
        length = min(request.confirmed, request.prompt_len + len(request.output_ids))
        key = _key(request.tokens(0, length))
        at = bisect.bisect_left(self._sorted, key, key=_key_of)
        if not keep or not length or any(p.owner is None and p.key.startswith(key) for p in self._sorted[at : at + 1]):
            return False
        self._insert(Prefix(key, request.slot, request.capacity, length, request.routes))
        return True

    def forget(self) -> list[Prefix]:
        """Find nothing of now any more; returns the prefixes without an owner, whose slots are free again."""
        left = self.left()
        self._sorted.clear()
        self._owned.clear()
        return left

    def find(self, request: Request) -> Hit | None:
        """The longest prefix of a request's known tokens but the last, which must be computed to draw from it."""
        key = _key(request.tokens(0, request.known))
        at = bisect.bisect_left(self._sorted, key, key=_key_of)
        hits = [self._hit(prefix, key, request) for prefix in self._sorted[max(at - 1, 0) : at + 1]]
        best = max((hit for hit in hits if hit is not None), key=lambda hit: hit.length, default=None)
        pending = any(hit is not None and hit.pending for hit in hits)
        if best is None:
            return None
        self._clock += 1
        best.prefix.used = self._clock
        return best._replace(pending=pending)

    def _hit(self, prefix: Prefix, key: bytes, request: Request) -> Hit | None:
        shared = min(_common(prefix.key, key), request.known - 1)
        length = min(shared, prefix.ready)
        if request.frozen:  # it has rows: only what was computed with these may serve it
            length = shared = _agreeing(prefix.routes, request, length)
        return Hit(prefix, length, pending=shared > length) if shared else None

    def evict(self, keep: Prefix | None = None) -> Prefix | None:
        """Forget the least recently used prefix that nobody owns."""
        victim = min((p for p in self.left() if p is not keep), key=lambda p: p.used, default=None)
        if victim is not None:
            self._sorted.remove(victim)
        return victim

    def _insert(self, prefix: Prefix) -> None:
        self._clock += 1
        prefix.used = self._clock
        bisect.insort(self._sorted, prefix, key=_key_of)


def _key_of(prefix: Prefix) -> bytes:
    return prefix.key


def _key(tokens: list[int]) -> bytes:
    return np.array(tokens, ">u4").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Tokens that two keys share."""
    count = min(len(one), len(other)) // 4
    different = np.flatnonzero(np.frombuffer(one, ">u4", count) != np.frombuffer(other, ">u4", count))
    return int(different[0]) if len(different) else count


def _agreeing(routes: RequestRoutes | None, request: Request, length: int) -> int:
    """How many of the first tokens have the rows that the request already has."""
    if routes is None or request.routes is None:
        return 0
    count = min(length, request.frozen)
    own, cached = request.routes.rows(0, count), routes.rows(0, count)
    different = np.flatnonzero((own[: len(cached)] != cached).any((1, 2)))
    if len(different):
        return int(different[0])
    return length if len(cached) == count else len(cached)
