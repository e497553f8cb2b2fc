"""JointWriter: several writers, each in a process of its own, fill one step; one of them commits all of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from storage.errors import DuplicateSampleError
from storage.open_folder import OpenFolder, Parts
from storage.store import Root
from storage.trace import RoutingSpec
from storage.writer import TraceWriter

logger = logging.getLogger(__name__)


class JointWriter(TraceWriter):
    """A TraceWriter that can hand its part of a step to another one of the same dataset, for one commit of both.

    >>> helper.write(table, step=0); parts = helper.hand_over(0)  # closed and on disk, still invisible
    >>> writer.write(other_table, step=0); writer.take_over([parts], step=0)
    >>> writer.commit(0); helper.release(0)                       # the samples of both appear at once

    A helper that dies after `hand_over` took nothing with it; one that dies before has handed over nothing. Whoever
    commits checks that no sample is there twice, whichever writers wrote it. On one local file system the writers must
    be on one host.
    """

    def __init__(self, root: Root, spec: RoutingSpec, **options: Any) -> None:
        super().__init__(root, spec, **options)
        self._handed_over: dict[int, OpenFolder] = {}

    def hand_over(self, step: int) -> Parts | None:
        """Close what was staged for `step`; None when nothing was. The files stay this writer's until `release`.

        Raises:
            ValueError: this writer has handed over the step already.
            OSError: the disk failed or is full; this writer's part of the step is abandoned.
        """
        with self._lock:
            if step in self._handed_over:
                raise ValueError(f"step {step} was handed over already; release or abandon it first")
            if step not in self._open:
                return None
            with self._abandoning(step):
                parts = self._open[step].close()
            self._handed_over[step] = self._open.pop(step)
            return parts

    def take_over(self, parts: Iterable[Parts], *, step: int) -> None:
        """Make parts that other writers handed over part of this writer's `step`.

        Raises:
            DuplicateSampleError: two writers wrote one sample; the step is abandoned.
            OSError: a file is gone, or the disk failed; the step is abandoned.
        """
        with self._lock:
            self.write([], step=step)
            with self._abandoning(step):
                for part in parts:
                    if twice := self._open[step].sample_ids & part.sample_ids:
                        raise DuplicateSampleError(f"sample_id {min(twice)!r} was written to step {step} before")
                    self._open[step].adopt(part)

    def release(self, step: int) -> None:
        """Forget a step that was handed over, once it is committed."""
        with self._lock:
            if (folder := self._handed_over.pop(step, None)) is not None:
                folder.release()

    def abandon(self, step: int) -> None:
        """Drop what was staged for `step`, handed over or not."""
        with self._lock:
            super().abandon(step)
            if (folder := self._handed_over.pop(step, None)) is not None:
                folder.remove()

    def close(self) -> None:
        """Abandon every step that was neither committed nor released."""
        with self._lock:
            for step in list(self._handed_over):
                logger.warning("dropping the part of step %d of %s that was handed over", step, self.root)
                self.abandon(step)
            super().close()
