"""A group of ranks behind the protocol of an engine in process: requests go to the least loaded rank.

The ranks live and die together. When one dies the group is started anew, takes the current weights, and samples again
what had not arrived: same sample ids, same random numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from rollout.backend import ModelInfo, PauseMode, SampleRequest, check_pause_mode, known_samples
from rollout.config import EngineOptions
from rollout.group_stream import GroupStream
from rollout.group_weights import SavedWeights, save
from rollout.loader import check_files
from rollout.parallel import CollectiveError
from rollout.rank_link import Launch, RankDiedError, RankSet, launch_processes, members
from rollout.rank_messages import Ended, RankStart
from rollout.update_modes import (
    WAITS_FOR_EVER,
    InFlight,
    KVMode,
    OneAtATime,
    UpdatesByHalves,
    check_sleep,
    check_version,
)

logger = logging.getLogger(__name__)
MAX_DEATHS = 3
CLOSE_SECONDS = 3.0


class _Given(NamedTuple):
    """A request that a rank has."""

    request: SampleRequest
    stream: GroupStream
    rank: int

    @property
    def cost(self) -> int:
        """Tokens that it may take."""
        return len(self.request.prompt_ids) + self.request.sampling_params.max_tokens


class GroupBackend(UpdatesByHalves):
    """`dp_size` ranks that serve one model, each with a part of its experts. Implements `rollout.backend.Backend`.

    >>> backend = GroupBackend("path/to/qwen3-moe", dp_size=2, moe_dispatch="alltoall", dtype="float32")

    Args:
        launch: starts the ranks; by default processes on this machine.
        graph_batches: see `Membership`.
        engine_options: of every rank; `kv_tokens`, `max_running_requests` and `max_batch_tokens` count per rank.

    Raises:
        Exception: what starting a rank raised, in its own type and words; none is left.
    """

    has_refs = False

    def __init__(
        self,
        model: str,
        *,
        launch: Launch = launch_processes,
        graph_batches: tuple[int, ...] = (),
        **engine_options: Any,
    ) -> None:
        self.options = EngineOptions(**engine_options)
        check_files(model)
        self._model, self._launch, self._graphs = model, launch, graph_batches
        self._directory = tempfile.TemporaryDirectory(prefix="moe-rollout-group-")
        self._given: dict[int, _Given] = {}
        self._ended: set[int] = set()
        self._numbers = itertools.count()
        self._streams: set[GroupStream] = set()
        self._turns = OneAtATime()
        self._weights: SavedWeights | None = None
        self._asleep, self._paused, self._closed = 0, False, False
        self._deaths = 0
        self._broken: BaseException | None = None
        self._changed = threading.Condition()
        self._ranks: RankSet | None = None
        try:
            ranks = self._start()
            if not self._serve(ranks):
                raise ranks.reason or RuntimeError("the ranks died")
        except BaseException:
            self._directory.cleanup()
            raise
        atexit.register(self.close)

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._info

    @property
    def ranks(self) -> RankSet:
        """The ranks that serve now; waits while a group is started.

        Raises:
            RuntimeError: the group is closed, or could not be started again.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ranks is not None or self._closed or self._broken is not None)
            if self._ranks is None or self._closed:
                raise RuntimeError("this group of ranks is closed") from self._broken
            return self._ranks

    @cached_property
    def window(self) -> int:
        """How many requests one stream keeps submitted."""
        return 2 * self.options.max_running_requests * self.options.dp_size

    def stream(self, requests: Sequence[SampleRequest]) -> GroupStream:
        """Each request's trace once, as they finish. Closing the stream aborts the rest.

        Raises:
            RuntimeError: the group sleeps; while iterating, its ranks keep dying.
        """
        if self._asleep:
            raise RuntimeError("the ranks sleep, their weights are not on the device: call wake() before sampling")
        stream = GroupStream(self, requests, self._info.spec)
        with self._changed:
            self._streams = {s for s in self._streams if s.outstanding()} | {stream}
        return stream

    def submit(self, requests: Sequence[SampleRequest], stream: GroupStream) -> list[int]:
        """Give each request to the rank with the fewest outstanding tokens. See GroupStream."""
        with self._changed:
            if self._closed or self._broken is not None:
                raise RuntimeError("this group of ranks is closed") from self._broken
            given = self._assign([(next(self._numbers), request, stream) for request in requests])
            if self._ranks is not None:
                self._send(self._ranks, given)
            return list(given)

    def end(self, numbers: list[int]) -> None:
        """Abort requests; those that have ended meanwhile are left alone."""
        with self._changed:
            self._ended |= self._given.keys() & set(numbers)
            if self._ranks is not None:
                self._send_ends(self._ranks, numbers)

    def pause(self, mode: PauseMode = "keep") -> None:
        """See Backend.pause; returns when all ranks rest."""
        check_pause_mode(mode)
        if mode == "abort":
            self.abort("all")
        self._paused = True
        self._ask_or_start_so("pause", mode)

    def resume(self) -> None:
        """Go on."""
        self._paused = False
        self._ask_or_start_so("resume")

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """See Backend.abort. A sample is known until its trace is taken."""
        with self._changed:
            streams = list(self._streams)
        wanted = known_samples(sample_ids, {name for stream in streams for name in stream.outstanding()})
        for stream in streams:
            stream.discard(wanted)

    @contextlib.contextmanager
    def prepare_update(
        self, source: Any, version: int, *, force: bool = False, check_finite: bool = False
    ) -> Iterator[Callable[[InFlight, KVMode], None]]:
        """The two halves of an update; see `Backend.prepare_update`.

        The weights are written to a temporary directory, from which each rank reads its part and a group that is
        started anew reads them again. A directory is read where it is: leave it there until the next update.
        """
        with self._turns.take(f"update_weights to version {version!r}"):
            if self._asleep:
                raise RuntimeError("update_weights while the ranks sleep; call wake(weights, version)")
            saved = self._save(source, version, force)
            staged = self.ranks
            try:
                staged.ask("stage", saved.directory, saved.saved_names, version, force, check_finite)
                yield lambda in_flight, kv: self._apply(staged, saved, in_flight, kv)
            finally:
                with contextlib.suppress(RankDiedError):  # nothing is left to be dropped
                    staged.ask("drop")

    def _apply(self, staged: RankSet, saved: SavedWeights, in_flight: InFlight, kv: KVMode) -> None:
        """A group that is started from now on begins with the new weights."""
        if in_flight == "wait" and self._paused:
            raise RuntimeError(WAITS_FOR_EVER)
        before, self._weights = self._weights, saved
        try:
            staged.ask("apply", in_flight, kv)
        except RankDiedError as error:
            logger.warning("the group begins again with the new weights: %s", error)
            self.ranks  # noqa: B018 (waits until it does)
        except Exception:
            self._weights = before
            raise

    def sleep(self, level: int = 1, *, in_flight: Literal["wait", "abort"] = "wait") -> None:
        """See `RolloutClient.sleep`: all ranks."""
        check_sleep(level, in_flight)
        with self._turns.take("sleep"):
            if self._asleep:
                raise RuntimeError("sleep while the ranks sleep; call wake()")
            if in_flight == "wait" and self._paused:
                raise RuntimeError(WAITS_FOR_EVER)
            self._asleep = level
            self._ask_or_start_so("sleep", level, in_flight)

    def wake(
        self, source: Any = None, version: int | None = None, *, force: bool = False, check_finite: bool = False
    ) -> None:
        """See `RolloutClient.wake`: all ranks."""
        with self._turns.take("wake"):
            if not self._asleep:
                raise RuntimeError("wake() of ranks that do not sleep")
            saved = None if source is None else self._save(source, version, force)
            names = (None, False) if saved is None else (saved.directory, saved.saved_names)
            self.ranks.ask("wake", *names, version, force, check_finite)
            self._asleep, self._weights = 0, saved or self._weights

    def rank_stats(self) -> list[dict[str, Any]]:
        """Counts of each rank; see RankServer.stats."""
        return self.ranks.ask("stats")

    def close(self) -> None:
        """Stop the ranks. Running streams end with finish_reason "abort"."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            ranks, streams = self._ranks, list(self._streams)
            self._changed.notify_all()
        for stream in streams:
            stream.abort()
        if ranks is not None:
            with contextlib.suppress(RankDiedError):
                ranks.ask("pause", "abort")
                ranks.ask("close")
                with self._changed:
                    self._changed.wait_for(lambda: not self._given, CLOSE_SECONDS)
            ranks.kill()
        self._fail(RuntimeError("this group of ranks is closed"))
        self._directory.cleanup()
        atexit.unregister(self.close)

    def _save(self, source: Any, version: Any, force: bool) -> SavedWeights:
        check_version(version, self._weights.version if self._weights is not None else 0, force)
        return save(source, version, self._directory.name)

    def _ask_or_start_so(self, name: str, *args: Any) -> None:
        """Ask all ranks; a group that dies over it is started in the state that was asked for."""
        try:
            self.ranks.ask(name, *args)
        except RankDiedError as error:
            logger.warning("%s: %s", name, error)
            self.ranks  # noqa: B018 (waits for the new group)

    def _start(self) -> RankSet:
        """A new group in the state of the old one: its weights, paused, asleep."""
        options = self.options
        links, meeting = self._launch(options.dp_size, self._directory.name, options.model_dump())
        ranks = RankSet(links, self._arrived, self._died)
        parts = members(options.dp_size, options.moe_dispatch, meeting, options.collective_timeout_s, self._graphs)
        self._info = ranks.start([RankStart(self._model, part, options.model_dump()) for part in parts])
        if (weights := self._weights) is not None:
            ranks.ask("stage", weights.directory, weights.saved_names, weights.version, True, False)
            ranks.ask("apply", "keep", "keep")
        if self._paused:
            ranks.ask("pause", "keep")
        if self._asleep:
            ranks.ask("sleep", self._asleep, "abort")
        return ranks

    def _arrived(self, ended: Ended) -> None:
        with self._changed:
            given = self._given.pop(ended.ticket, None)
            self._ended.discard(ended.ticket)
            if given is not None:
                self._deaths = 0
                given.stream.put(ended)
                self._changed.notify_all()

    def _died(self, ranks: RankSet, reason: RankDiedError) -> None:
        """Start anew; runs on the thread that saw the death."""
        with self._changed:
            if self._closed or ranks is not self._ranks:
                return
            self._ranks = None
        while not self._started_again(reason):
            pass

    def _started_again(self, reason: BaseException) -> bool:
        """Whether the group serves again, or never will."""
        self._deaths += 1
        logger.warning("the group is started again: %s", reason)
        if self._deaths >= MAX_DEATHS:
            self._fail(RuntimeError(f"the ranks died {self._deaths} times in a row; at last: {reason}"))
            return True
        try:
            return self._serve(self._start())
        except (RankDiedError, CollectiveError) as again:
            logger.warning("the group died while it was started: %s", again)
            return False
        except Exception as error:
            self._fail(error)
            return True

    def _serve(self, ranks: RankSet) -> bool:
        """Give the ranks what is missing; False when they are dead already."""
        with self._changed:
            if self._closed:
                ranks.kill()
                return True
            if ranks.reason is not None:
                return False
            self._ranks = ranks
            missing, self._given = self._given, {}
            self._send(ranks, self._assign([(number, g.request, g.stream) for number, g in missing.items()]))
            self._send_ends(ranks, list(self._ended))
            self._changed.notify_all()
            return True

    def _fail(self, error: BaseException) -> None:
        """Nothing will arrive any more: every stream that waits is told why."""
        with self._changed:
            self._broken = self._broken or error
            for stream in {id(given.stream): given.stream for given in self._given.values()}.values():
                stream.put(error)
            self._given.clear()
            self._changed.notify_all()

    def _assign(self, requests: Sequence[tuple[int, SampleRequest, GroupStream]]) -> dict[int, _Given]:
        load = [0] * self.options.dp_size
        for given in self._given.values():
            load[given.rank] += given.cost
        added = {}
        for number, request, stream in requests:
            added[number] = given = _Given(request, stream, load.index(min(load)))
            load[given.rank] += given.cost
        self._given |= added
        return added

    def _send(self, ranks: RankSet, given: dict[int, _Given]) -> None:
        work: dict[int, list[tuple[int, SampleRequest]]] = {}
        for number, (request, _, rank) in given.items():
            work.setdefault(rank, []).append((number, request))
        if work:
            ranks.tell("submit", {rank: (tickets,) for rank, tickets in work.items()})

    def _send_ends(self, ranks: RankSet, numbers: Sequence[int]) -> None:
        where: dict[int, list[int]] = {}
        for number in numbers:
            if number in self._given:
                where.setdefault(self._given[number].rank, []).append(number)
        if where:
            ranks.tell("end", {rank: (numbers,) for rank, numbers in where.items()})
