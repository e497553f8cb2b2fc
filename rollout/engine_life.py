"""The life of a served engine: which weights it has, when it counts as dead, and how it comes back.

An engine that this client owns is started again by whoever asks next, with the weights of the last update. A server is
others' to start: the client goes on when it answers again, and loads those weights once more if it has lost them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from rollout.canary import difference, greedy_requests, sing
from rollout.engine_adapter import EngineAdapter
from rollout.engine_reply import EngineDeadError, EngineError
from rollout.update_modes import Unchanging

logger = logging.getLogger(__name__)


class EngineLife:
    """For use inside one event loop."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self.version = 0
        self._source: Any = None  # of the last update, when it can be loaded again
        self._updated = False
        self.rehearsed = False
        self.refused: str | None = None  # why this engine takes no weights in place
        self._dead: str | None = None
        self._strange = 0  # times that a server was found to have other weights than ours
        self._strangest = ""  # what was found the last time
        self._condemned = False  # dead by an update of ours: its version says no more
        self._lost: str | None = None  # alive again, but without its weights
        self._beyond_help = False
        self._updating = False
        self._revival: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start or connect; see `EngineAdapter.open`."""
        self.version = await self._adapter.open()

    async def close(self) -> None:
        """End a start that is under way, so that it leaves no engine behind, then release the engine."""
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)
        await self._adapter.close()

    @property
    def serving(self) -> bool:
        """Neither dead, nor being started, nor taking weights: requests that run are computed."""
        return self._dead is None and not self._updating

    def died(self, why: str) -> None:
        """A request found the engine dead; whoever asks next starts it again."""
        if self._dead is None:
            logger.warning("%s counts as dead: %s", self._adapter.capabilities.engine, why)
            self._dead = why

    async def check(self) -> int:
        """`ready`, and ask the engine first: one that was started again behind our back has other weights.

        Returns:
            How often it was found with other weights so far, for `settle`.
        """
        if self._dead is None and not self._updating:
            await self._compare()
        await self.ready()
        return self._strange

    async def _compare(self) -> None:
        need = self.version
        try:
            found = await self._adapter.weight_version()
            strange = f"it has weight version {found}, need {need}" if found != need else None
        except EngineError as error:
            self.died(str(error))
            return
        except ValueError as error:  # broken by another client's update, or named by hand
            strange = str(error)
        if strange is not None and need == self.version and not self._updating:
            self._is_strange(strange)
            self.died(strange)

    def _is_strange(self, why: str) -> None:
        self._strange, self._strangest = self._strange + 1, why

    async def settle(self, noted: int) -> None:
        """Behind the last answer of a call: were all of the weights that they are labelled with?

        Other calls may have found strange weights under this one, and the engine may be dead of them or have ours again
        by now: so it is counted, from what `check` returned when the call began.

        Raises:
            EngineDeadError: others updated the engine meanwhile, or it was started again.
        """
        if not self._others_load:
            return
        if not self._updating and not self._condemned:
            await self._compare()
        if self._strange != noted:
            raise EngineDeadError(
                f"{self._strangest}, found before the call ended: which answers are of which weights is not known"
            )

    @property
    def _others_load(self) -> bool:
        """Whether answers can be of weights that others loaded, without saying so."""
        return not self._adapter.owned and not self._adapter.capabilities.version_spans

    async def ready(self) -> None:
        """Return when the engine can sample from the current weights.

        Raises:
            EngineDeadError: it is dead and could not be brought back; the message says what to do.
        """
        await self._alive()
        if self._lost is not None:
            raise EngineDeadError(self._lost)

    async def _alive(self) -> None:
        if self._dead is None:
            return
        if self._revival is None:
            self._revival = asyncio.ensure_future(self._revive())
            self._revival.add_done_callback(self._revived)
        await asyncio.shield(self._revival)

    def _revived(self, revival: asyncio.Task[None]) -> None:
        self._revival = None
        if not revival.cancelled():
            revival.exception()  # those who waited have it; nobody may be left

    async def _revive(self) -> None:
        if self._beyond_help:
            raise EngineDeadError(f"this engine is dead: {self._dead}; start it again and connect anew")
        try:
            await self._catch_up(await self._adapter.open())
        except (EngineError, ValueError) as error:
            raise EngineDeadError(f"this engine is dead: {self._dead}; start it again: {error}") from error
        logger.warning("%s is back with weight version %d", self._adapter.capabilities.engine, self.version)
        self._dead, self._condemned = None, False

    async def _catch_up(self, found: int) -> None:
        """Bring an engine that has just opened with version `found` to ours."""
        if found == self.version and not (self._updated and found == 0):
            return
        self._is_strange(f"it has weight version {found}, need {self.version}")
        if found != 0 or not self._updated:
            raise EngineError(f"it has weight version {found}, need {self.version}: others updated it, connect anew")
        if self._source is None:
            self._lost = (
                f"the engine was started again and has lost the weights of version {self.version}, which came as a "
                "state dict: call update_weights"
            )
            return
        await self._adapter.load_weights(self._source, self.version)

    async def update(self, source: Any, version: int, *, running: bool) -> None:
        """Load checked weights. The first time is a rehearsal too, see rollout/canary.py.

        Raises:
            EngineDeadError: it failed, and the engine counts as dead; or it was dead and could not be brought back.
        """
        if self._dead is None and self._others_load:
            await self._compare()  # the last time that calls under way can learn of it
        await self._alive()
        self._updating = True
        try:
            await self._rehearse(running)
            await self._adapter.load_weights(source, version, running=running)
            self.version, self._updated, self._lost = version, True, None
            kept = not isinstance(source, Mapping) or isinstance(source, Unchanging)
            self._source = source if kept else None
        except Exception as error:
            await self._failed(f"its update to weight version {version} failed: {error}")
            again = "it is started again when it is asked next" if self._adapter.owned else "start it again"
            raise EngineDeadError(f"{self._dead}; {again}") from error
        finally:
            self._updating = False

    async def _failed(self, why: str) -> None:
        self._dead, self._condemned = why, True
        try:
            await self._adapter.condemn()
        except EngineDeadError:
            logger.warning("%s does not answer after a failed update", self._adapter.capabilities.engine)
        except EngineError as error:
            logger.warning("%s could not be condemned: %s", self._adapter.capabilities.engine, error)
            self._beyond_help = True

    async def _rehearse(self, running: bool) -> None:
        if self.rehearsed:
            return
        model = self._adapter.model
        songs = greedy_requests(model.vocab_size)
        own = model.path if self.version else self._adapter.own_weights
        before = await sing(self._adapter.generate, model, songs)
        await self._adapter.load_weights(own, self.version, running=running)
        after = await sing(self._adapter.generate, model, songs)
        if changed := difference(before, after):
            other = f"; or version {self.version} is not in {own}" if self.version else ""
            self.refused = f"loading its own weights again changed the model ({changed}){other}"
            raise EngineError(f"{self.refused}: updates in place are refused")
        self.rehearsed = True
