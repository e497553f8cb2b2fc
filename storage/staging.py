"""Where writers prepare steps: `root/_staging/`, one locked directory per open step.

A writer holds an exclusive `flock` on the directory of each step it has open, and the kernel drops it
when the process dies, however it dies: staging without a lock is litter, and anyone can tell.
`_staging` itself is locked for the short moments in which entries are made, judged or published. A lock
says nothing about other hosts of a shared file system, hence the host in each name: another host's
staging is reported, and left alone unless the caller says that no writer runs there. A container that is started
again on the same volume is often such another host.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG

from storage.durable import fsync_directory, make_directories, write_durably
from storage.errors import DatasetInUseError
from storage.links import refuse_link
from storage.manifest import DATASET_FILE, dataset_json
from storage.promises import Promises
from storage.trace import RoutingSpec

logger = logging.getLogger(__name__)
_STAGING = "_staging"
LIVE_S = 3600.0
"""A writer of another host that has written within the last hour is taken for alive."""
_ENTRY = re.compile(r"(?:\d{9,}|dataset|file|pack|dropped)-(?P<host>.+)-[0-9a-f]{32}")


class StagingDirectory:
    """A locked directory that one writer fills, then renames into place or removes."""

    def __init__(self, root: Path, what: str) -> None:
        with staging_lock(root):
            self.path = new_entry(root, what)
            self.path.mkdir()
            self._lock: int | None = _lock(self.path)

    def publish(self, target: Path) -> None:
        """Rename into place, atomically; OSError with ENOTEMPTY or EEXIST when `target` exists."""
        os.rename(self.path, target)
        self._unlock()

    def remove(self) -> None:
        """Delete everything staged. A failure is logged: what stays is litter, never data."""
        remove_entry(self.path)
        self._unlock()

    def _unlock(self) -> None:
        """Once: the number of a closed descriptor may belong to another file by now."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def create_dataset(root: Path, spec: RoutingSpec, promises: Promises | None = None) -> bool:
    """Make `root` a dataset of `spec`; False when it is one already. Of several racing writers one creates it."""
    make_directories(root)
    with staging_lock(root):
        if (root / DATASET_FILE).exists():
            return False
        temporary, created = new_entry(root, "dataset"), False
        write_durably(temporary, dataset_json(spec, promises))
        with suppress(FileExistsError):  # a writer on another host was faster
            os.link(temporary, root / DATASET_FILE)
            created = True
        temporary.unlink()
        fsync_directory(root)
        return created


def check_writable(root: Path) -> None:
    """PermissionError now, rather than after hours of sampling: read-only mounts and foreign directories."""
    if not os.access(root / _STAGING, os.W_OK):
        raise PermissionError(errno.EACCES, "the dataset cannot be written", str(root))


def dead_staging(root: Path, *, all_hosts: bool = False) -> list[Path]:
    """Staging left by writers that died; of other hosts, whose locks are invisible, only when asked."""
    if not (root / _STAGING).is_dir():
        return []
    with staging_lock(root):
        return [entry for entry in sorted((root / _STAGING).iterdir()) if _is_dead(entry, all_hosts)]


def foreign_staging(root: Path) -> list[str]:
    """Staging of other hosts that nobody on this one holds, one text each, with what is needed to judge it. What was
    written within the last hour is taken for a live writer's, and only logged.

    >>> foreign_staging(Path("traces"))
    ['traces/_staging/000000007-pod-1-...: of a writer on host pod-1, last written 2026-11-30T12:00:00+00:00, 2147483648
    bytes; if no writer runs there any more, `moe-rollout verify traces --repair --all-hosts` removes it']
    """
    if not (root / _STAGING).is_dir():
        return []
    with staging_lock(root):
        entries = [entry for entry in sorted((root / _STAGING).iterdir()) if _is_foreign(entry)]
    reports = [report for entry in entries if (report := _foreign(entry))]
    for text in [text for age, text in reports if age < LIVE_S]:
        logger.info("%s", text)
    remedy = f"if no writer runs there any more, `moe-rollout verify {root} --repair --all-hosts` removes it"
    return [f"{text}; {remedy}" for age, text in reports if age >= LIVE_S]


def _foreign(entry: Path) -> tuple[float, str] | None:
    """Seconds since it was last written, as far as that can be seen, and a text; None when a writer here holds it."""
    written, text = -math.inf, f"{entry}: of a writer on host {_host(entry)}"
    try:
        written = entry.lstat().st_mtime
        if not _is_unlocked(entry):
            return None
        found = [path.lstat() for path in [entry, *entry.rglob("*")]]
        written = max(stat.st_mtime for stat in found)
        size = sum(stat.st_size for stat in found if S_ISREG(stat.st_mode))
    except FileNotFoundError:  # its writer lives, and has published or removed it at this moment
        return None
    except OSError as error:  # of another user, or of a file server that has forgotten it
        return time.time() - written, f"{text}, which cannot be judged ({error.strerror})"
    when = datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")
    return time.time() - written, f"{text}, last written {when}, {size} bytes"


def clean_staging(root: str | os.PathLike[str], *, all_hosts: bool = False) -> list[Path]:
    """Remove what dead writers left in `root/_staging`; returns the removed paths. Live writers keep theirs.

    What writers of other hosts left is logged. Pass `all_hosts=True`, to remove it too, only when no writer of another
    host is at work on a shared file system.
    """
    dead = dead_staging(Path(root), all_hosts=all_hosts)
    for report in [] if all_hosts else foreign_staging(Path(root)):
        logger.warning("%s", report)
    for entry in dead:
        logger.warning("removing %s, left by a writer that died; it was never committed", entry)
        remove_entry(entry)
    return dead


@contextmanager
def staging_lock(root: Path) -> Iterator[None]:
    """Exclusive among the threads and processes of this host; held while entries of `_staging` change.

    Raises:
        DamagedDataError: `_staging` is a symbolic link.
    """
    refuse_link(root / _STAGING)
    (root / _STAGING).mkdir(exist_ok=True)
    descriptor = _lock(root / _STAGING)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def rewriting(root: Path) -> Iterator[None]:
    """Held by whoever compacts or archives: a second one on this host would read folders that the first one deletes.

    Raises:
        DatasetInUseError: another process or thread holds it.
    """
    try:
        descriptor = _lock(root, fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DatasetInUseError(
            f"{root} is being compacted or archived by another; when it has ended, call again"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def _lock(directory: Path, flags: int = 0) -> int:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def new_entry(root: Path, what: str) -> Path:
    """A path in `_staging` that no one else uses and every host can judge."""
    return root / _STAGING / f"{what}-{socket.gethostname()}-{uuid.uuid4().hex}"


def _host(entry: Path) -> str | None:
    """Of the writer; None for a name that is no writer's."""
    match = _ENTRY.fullmatch(entry.name)
    return match and match["host"]


def _is_foreign(entry: Path) -> bool:
    return _host(entry) not in (None, socket.gethostname())


def _is_dead(entry: Path, all_hosts: bool) -> bool:
    """False too, and logged, for one of another host that cannot be judged: no reason to stop a writer of this one."""
    if _host(entry) is None or (_is_foreign(entry) and not all_hosts):
        return False
    try:
        return _is_unlocked(entry)
    except OSError as error:
        if not _is_foreign(entry):
            raise
        logger.warning("%s is left: it cannot be judged (%s)", entry, error)
        return False


def _is_unlocked(entry: Path) -> bool:
    if entry.is_symlink():
        return True
    try:
        os.close(_lock(entry, fcntl.LOCK_NB))
    except (BlockingIOError, FileNotFoundError):  # a live writer holds it, or has just removed it
        return False
    return True


def remove_entry(entry: Path) -> None:
    """Delete an entry of `_staging`; a failure is logged."""
    try:
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    except OSError as error:
        logger.warning("could not remove %s: %s; clean_staging() will", entry, error)
