"""The ranks of a group live and die together. When one dies the group is started anew, in the state that is wanted of
it, and samples again what had not arrived: same sample ids, same random numbers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rollout.backend import ModelInfo, SampleRequest
from rollout.group_state import GroupState, bring
from rollout.group_stream import GroupStream
from rollout.group_work import GroupWork
from rollout.parallel import CollectiveError
from rollout.rank_link import Death, RankDiedError, RankSet
from rollout.rank_messages import Ended, RankStart

logger = logging.getLogger(__name__)
MAX_DEATHS = 3
CLOSE_SECONDS = 3.0

NewRanks = Callable[[Callable[[Ended], None], Death], tuple[RankSet, list[RankStart]]]
"""Called with RankSet's `on_ended` and `on_death`: the ranks of a new group, and what they are started with."""


class GroupLife:
    """Keeps a group of `size` ranks alive, and knows what they owe; to stop they have `timeout_s`. Any thread may call.

    Raises:
        Exception: what starting a rank raised, in its own type and words; none is left.
    """

    def __init__(self, size: int, new_ranks: NewRanks, timeout_s: float = 60.0) -> None:
        self._new_ranks, self._timeout_s = new_ranks, timeout_s
        self._work = GroupWork(size)
        self._changed = threading.Condition()
        self._ranks: RankSet | None = None
        self._starting: RankSet | None = None
        self._begins = threading.Lock()  # held while ranks are started
        self._have = self._wanted = GroupState()
        self._deaths, self._closed = 0, False
        self._broken: BaseException | None = None
        self.info: ModelInfo
        self._begin()

    @property
    def wanted(self) -> GroupState:
        """The state that the group has, or begins in when it is started anew."""
        return self._wanted

    @property
    def serving(self) -> RankSet | None:
        """The ranks that serve now; None while others are started."""
        return self._ranks

    @property
    def ranks(self) -> RankSet:
        """The ranks that serve now; waits while a group is started.

        Raises:
            RuntimeError: the group is closed, or could not be started again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ranks is not None or self._closed or self._broken is not None)
            self._check_open()
            assert self._ranks is not None
            return self._ranks

    def submit(self, requests: Sequence[SampleRequest], stream: GroupStream) -> list[int]:
        """See GroupStream. Raises RuntimeError when the group is closed or could not be started again."""
        with self._changed:
            self._check_open()
            return self._work.add(requests, stream, self._ranks)

    def end(self, numbers: list[int]) -> None:
        """See GroupStream."""
        with self._changed:
            self._work.end(numbers, self._ranks)

    def reach(self, ranks: RankSet, name: str, args: Sequence[Any], **state: Any) -> None:
        """Ask ranks for what takes them to this state; when they die over it, those that follow begin there.

        Raises:
            RuntimeError: the group cannot be started again.
            Exception: the ranks refuse; the old state stays.
        """
        before = {key: getattr(self._wanted, key) for key in state}
        self._want(None, **state)
        try:
            ranks.ask(name, *args)
        except RankDiedError as error:
            logger.warning("%s: %s", name, error)
            self._settle()
        except Exception:
            self._want(None, **before)
            raise
        else:
            self._want(ranks, **state)

    def ask_living(self, name: str, *args: Any) -> RankSet:
        """Ask ranks for what a new group cannot be started with, so when they die, the next ones. Who answered.

        Raises:
            RankDiedError: they died each time.
            Exception: why they refuse.
        """
        for _ in range(MAX_DEATHS - 1):
            with contextlib.suppress(RankDiedError):
                return self._ask(name, *args)
        return self._ask(name, *args)

    def reached(self, ranks: RankSet, **state: Any) -> None:
        """These ranks are in this state, and the group is to be."""
        self._want(ranks, **state)
        self._settle()

    def begun(self) -> None:
        """Return when no ranks are being started: those that are later read the state that is wanted now."""
        with self._begins:
            pass

    def close(self) -> None:
        """Stop the ranks, and wait a moment for what they still deliver."""
        with self._changed:
            self._closed = True
            ranks = self._ranks
            if self._starting is not None:
                self._starting.kill()
            self._changed.notify_all()
        self.begun()
        if ranks is not None:
            with contextlib.suppress(RankDiedError):
                ranks.ask("pause", "abort", within=self._timeout_s)
                ranks.ask("close", within=self._timeout_s)
                with self._changed:
                    self._changed.wait_for(lambda: not len(self._work), CLOSE_SECONDS)
            ranks.kill()
        self._fail(RuntimeError("this group of ranks is closed"))

    def _ask(self, name: str, *args: Any) -> RankSet:
        ranks = self.ranks
        ranks.ask(name, *args)
        return ranks

    def _want(self, ranks: RankSet | None, **state: Any) -> None:
        """Note what is wanted, and what `ranks` are."""
        with self._changed:
            self._wanted = self._wanted._replace(**state)
            if ranks is not None and ranks is self._ranks:
                self._have = self._have._replace(**state)

    def _settle(self) -> None:
        """Wait for a group in the wanted state; one that began to serve just before that was wanted makes way."""
        while True:
            ranks = self.ranks
            with self._changed:
                if self._ranks is not ranks:
                    continue
                if self._have.same(self._wanted):
                    return
                self._ranks = None
            ranks.kill()
            self._start_again(None)

    def _check_open(self) -> None:
        if self._closed or self._broken is not None:
            raise RuntimeError("this group of ranks is closed") from self._broken

    def _begin(self) -> None:
        """Start ranks in the wanted state and let them serve.

        Raises:
            RankDiedError, CollectiveError: they died.
            Exception: why they cannot be started; none is left.
        """
        with self._begins:
            while not self._closed and not self._start():
                pass

    def _start(self) -> bool:
        """Whether the ranks serve."""
        ranks, starts = self._new_ranks(self._arrived, self._died)
        served = False
        try:
            with self._changed:
                if self._closed:
                    return False
                self._starting = ranks
            self.info = ranks.start(starts)
            served = self._bring_and_serve(ranks)
        finally:
            self._starting = None
            if not served:
                ranks.kill()
        return served

    def _bring_and_serve(self, ranks: RankSet) -> bool:
        """False when what is wanted has changed so that only new ranks get there."""
        have, want = GroupState(), self._wanted
        while bring(ranks, have, want):
            have = want
            with self._changed:
                if self._closed:
                    return False
                if ranks.reason is not None:
                    raise ranks.reason
                want = self._wanted
                if have.same(want):
                    self._ranks, self._have = ranks, have
                    self._work.give_all(ranks)
                    self._changed.notify_all()
                    return True
        return False

    def _arrived(self, ended: Ended) -> None:
        with self._changed:
            if self._work.arrived(ended):
                self._deaths = 0
                self._changed.notify_all()

    def _died(self, ranks: RankSet, reason: RankDiedError) -> None:
        """Start anew; runs on the thread that saw the death."""
        with self._changed:
            if self._closed or ranks is not self._ranks:
                return
            self._ranks = None
        self._start_again(reason)

    def _start_again(self, death: BaseException | None) -> None:
        """Until the group serves again, or never will. `death`: what it is started again for, if ranks died."""
        while not self._closed and (death is None or self._may_follow(death)):
            try:
                return self._begin()
            except (RankDiedError, CollectiveError) as again:
                death = again
            except Exception as error:
                return self._fail(error)

    def _may_follow(self, death: BaseException) -> bool:
        """Count a death; one too many is the end."""
        self._deaths += 1
        if self._deaths < MAX_DEATHS:
            logger.warning("the group is started again: %s", death)
            return True
        self._fail(RuntimeError(f"the ranks died {self._deaths} times in a row; at last: {death}"))
        return False

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._broken = self._broken or error
            self._work.fail(error)
            self._changed.notify_all()
