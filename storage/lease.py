"""A lease: at most one holder of a dataset, named in the error that the second one gets.

Commits are safe without it: of two writers of one step or sample exactly one wins. What it saves is the GPU time of
a second pipeline that somebody starts by mistake. The lock is the kernel's (`flock` on `_lease.json`), so a holder that
dies, however it dies, holds nothing: there is no expiry to wait for and no clock to trust. The text in the file only
says who holds it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from storage.durable import make_directories
from storage.errors import DatasetInUseError
from storage.links import refuse_link
from storage.store import Root, is_remote, local_path

logger = logging.getLogger(__name__)
LEASE_FILE = "_lease.json"


class Lease:
    """Held from its making until `release` or the end of its block.

    >>> with Lease("traces/", owner="pipeline run.toml"):
    ...     ...

    Args:
        root: a local dataset; it need not exist yet.
        owner: who asks, for the others' error message.
        wait_s: how long to wait for a holder that is about to end.

    Raises:
        DatasetInUseError: another process, or another Lease of this one, holds it.
        ValueError: for an object store, which has no locks.
        DamagedDataError: the lease is a symbolic link.
    """

    def __init__(self, root: Root, owner: str, *, wait_s: float = 0.0) -> None:
        if is_remote(root):
            raise ValueError(f"{root} is an object store, which has no locks: a lease needs a local dataset")
        directory = local_path(root)
        make_directories(directory)
        self._path = directory / LEASE_FILE
        refuse_link(self._path)
        self._descriptor: int | None = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(time.monotonic() + wait_s)
            self._sign(owner)
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        """Let others have it; releasing twice is fine."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _lock(self, deadline: float) -> None:
        assert self._descriptor is not None
        while True:
            try:
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DatasetInUseError(self._in_use()) from error
                time.sleep(0.05)

    def _in_use(self) -> str:
        holder = self._holder()
        who = "process {pid} on {host} ({owner}, since {since})".format_map(holder) if holder else "another process"
        return f"{self._path.parent} is in use by {who}; wait for it, stop it, or choose another directory"

    def _holder(self) -> dict[str, Any] | None:
        with suppress(ValueError):  # it is being written at this moment
            holder = json.loads(self._path.read_bytes())
            if isinstance(holder, dict) and holder.keys() >= {"pid", "host", "owner", "since"}:
                return holder
        return None

    def _sign(self, owner: str) -> None:
        assert self._descriptor is not None
        if (dead := self._holder()) is not None:
            logger.warning("taking over %s from process %s on %s, which died", self._path, dead["pid"], dead["host"])
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "owner": owner, "since": since}
        os.ftruncate(self._descriptor, 0)
        data = json.dumps(holder).encode()
        if os.pwrite(self._descriptor, data, 0) != len(data):
            raise OSError(errno.ENOSPC, "No space left to write the lease", str(self._path))
