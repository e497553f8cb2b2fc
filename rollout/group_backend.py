"""A group of ranks behind the protocol of an engine in process: requests go to the least loaded rank."""

from __future__ import annotations

import atexit
import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from rollout.backend import ModelInfo, PauseMode, SampleRequest, check_pause_mode, known_samples
from rollout.config import EngineOptions
from rollout.figures import Figures, merge
from rollout.group_life import GroupLife
from rollout.group_progress import GroupProgress
from rollout.group_stream import GroupStream
from rollout.group_weights import SavedWeights, discard, save
from rollout.loader import check_files
from rollout.rank_link import Death, Launch, RankDiedError, RankSet, launch_processes, members
from rollout.rank_messages import Ended, RankStart
from rollout.sharded_loader import check_divides
from rollout.update_modes import (
    WAITS_FOR_EVER,
    InFlight,
    KVMode,
    OneAtATime,
    UpdatesByHalves,
    check_sleep,
    check_version,
)


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
        check_divides(model, self.options.dp_size, self.options.trust_remote_code)
        self._model, self._launch, self._graphs = model, launch, graph_batches
        self._directory = tempfile.TemporaryDirectory(prefix="moe-rollout-group-")
        self._streams: set[GroupStream] = set()
        self._lock = threading.Lock()
        self._turns, self._progress = OneAtATime(), GroupProgress()
        self._closed = False
        try:
            self._life = GroupLife(self.options.dp_size, self._new_ranks, self.options.collective_timeout_s)
        except BaseException:
            self._directory.cleanup()
            raise
        atexit.register(self.close)

    @property
    def info(self) -> ModelInfo:
        """Facts of the loaded model."""
        return self._life.info

    @property
    def ranks(self) -> RankSet:
        """See GroupLife.ranks."""
        return self._life.ranks

    @property
    def progress(self) -> int | None:
        """Grows with the tokens that are computed; None while ranks are started. Never waits, see GroupProgress."""
        return self._progress.of(self._life.serving)

    @cached_property
    def window(self) -> int:
        """How many requests one stream keeps submitted."""
        return 2 * self.options.max_running_requests * self.options.dp_size

    def stream(self, requests: Sequence[SampleRequest]) -> GroupStream:
        """Each request's trace once, as they finish. Closing the stream aborts the rest.

        Raises:
            RuntimeError: the group sleeps; while iterating, its ranks keep dying.
        """
        if self._life.wanted.asleep:
            raise RuntimeError("the ranks sleep, their weights are not on the device: call wake() before sampling")
        stream = GroupStream(self, requests, self.info.spec)
        with self._lock:
            self._streams = {s for s in self._streams if s.outstanding()} | {stream}
        return stream

    def submit(self, requests: Sequence[SampleRequest], stream: GroupStream) -> list[int]:
        """Give each request to the rank with the fewest outstanding tokens. See GroupStream."""
        return self._life.submit(requests, stream)

    def end(self, numbers: list[int]) -> None:
        """Abort requests; those that have ended meanwhile are left alone."""
        self._life.end(numbers)

    def pause(self, mode: PauseMode = "keep") -> None:
        """See Backend.pause; returns when all ranks rest. Ranks that die meanwhile are followed by paused ones."""
        check_pause_mode(mode)
        if mode == "abort":
            self.abort("all")
        self._life.reach(self.ranks, "pause", [mode], paused=True)

    def resume(self) -> None:
        """Go on."""
        self._life.reach(self.ranks, "resume", [], paused=False)

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """See Backend.abort. A sample is known until its trace is taken."""
        with self._lock:
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
        started anew reads them again. A directory is read where it is: leave it there until the next update. Ranks that
        die between the halves, or over the second, are followed by ones with the new weights.
        """
        with self._turns.take(f"update_weights to version {version!r}"):
            if self._life.wanted.asleep:
                raise RuntimeError("update_weights while the ranks sleep; call wake(weights, version)")
            with self._saved(source, version, force) as saved:
                staged = self._stage(saved, force, check_finite)
                try:
                    yield lambda in_flight, kv: self._apply(staged, saved, in_flight, kv)
                finally:
                    with contextlib.suppress(RankDiedError):  # nothing is left to be dropped
                        staged.ask("drop")

    def _stage(self, saved: SavedWeights, force: bool, check_finite: bool) -> RankSet:
        try:
            return self._life.ask_living("stage", *saved.where, saved.version, force, check_finite)
        except RankDiedError:
            raise
        except Exception:  # of a rank whose part is bad; the others hold theirs, and would refuse every later update
            with contextlib.suppress(RuntimeError):
                self.ranks.ask("drop")
            raise

    def _apply(self, staged: RankSet, saved: SavedWeights, in_flight: InFlight, kv: KVMode) -> None:
        if in_flight == "wait" and self._life.wanted.paused:
            raise RuntimeError(WAITS_FOR_EVER)
        self._life.reach(staged, "apply", [in_flight, kv], weights=saved)

    def sleep(self, level: int = 1, *, in_flight: Literal["wait", "abort"] = "wait") -> None:
        """See `RolloutClient.sleep`: all ranks."""
        check_sleep(level, in_flight)
        with self._turns.take("sleep"):
            if self._life.wanted.asleep:
                raise RuntimeError("sleep while the ranks sleep; call wake()")
            if in_flight == "wait" and self._life.wanted.paused:
                raise RuntimeError(WAITS_FOR_EVER)
            self._life.reach(self.ranks, "sleep", [level, in_flight], asleep=level)

    def wake(
        self, source: Any = None, version: int | None = None, *, force: bool = False, check_finite: bool = False
    ) -> None:
        """See `RolloutClient.wake`: all ranks."""
        with self._turns.take("wake"):
            before = self._life.wanted
            if not before.asleep:
                raise RuntimeError("wake() of ranks that do not sleep")
            if source is None:
                self._wake(before.weights, (None, False), version, force, check_finite)
                return
            with self._saved(source, version, force) as saved:
                # ranks wake together: one that refused alone would keep the others waiting for ever
                self._life.ask_living("check_weights", *saved.where, version, force, check_finite)
                self._wake(saved, saved.where, version, force, check_finite)

    def _wake(self, weights: SavedWeights | None, where: tuple[str | None, bool], *how: Any) -> None:
        awake = self._life.ask_living("wake", *where, *how)
        self._life.reached(awake, asleep=0, weights=weights)

    def rank_stats(self) -> list[dict[str, Any]]:
        """Counts of each rank; see RankServer.stats."""
        return self.ranks.ask("stats", within=self.options.collective_timeout_s)

    def figures(self) -> Figures:
        """See `Backend.figures`: of all ranks together. Waits while a group is started."""
        while True:
            with contextlib.suppress(RankDiedError):  # their successors have counts of their own
                found = self.ranks.ask("figures", within=self.options.collective_timeout_s)
                return merge(found) | {"engines": 1}

    def close(self) -> None:
        """Stop the ranks. Running streams end with finish_reason "abort"."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.abort()
        self._life.close()
        self._directory.cleanup()
        atexit.unregister(self.close)

    @contextlib.contextmanager
    def _saved(self, source: Any, version: Any, force: bool) -> Iterator[SavedWeights]:
        """Weights that an update is to bring; in the end the disk holds those that ranks may be started with."""
        before = self._life.wanted.weights
        check_version(version, before.version if before is not None else 0, force)
        saved = save(source, version, self._directory.name)
        try:
            yield saved
        finally:
            self._life.begun()
            discard(before if self._life.wanted.weights is saved else saved, self._directory.name)

    def _new_ranks(self, on_ended: Callable[[Ended], None], on_death: Death) -> tuple[RankSet, list[RankStart]]:
        options = self.options
        links, meeting = self._launch(options.dp_size, self._directory.name, options.model_dump())
        parts = members(options.dp_size, options.moe_dispatch, meeting, options.collective_timeout_s, self._graphs)
        starts = [RankStart(self._model, part, options.model_dump()) for part in parts]
        return RankSet(links, on_ended, on_death), starts
