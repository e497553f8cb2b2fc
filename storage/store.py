"""Where a dataset lies: a local directory, or an object store (object_store.py). Names are relative to its root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from storage.durable import fsync_directory, write_durably
from storage.links import refuse_links
from storage.manifest import MANIFEST_FILE, is_folder
from storage.staging import new_entry, remove_entry, staging_lock

Root = str | os.PathLike[str]


class Stamp(NamedTuple):
    """Changes when a manifest does: its size in bytes and when it was written, in nanoseconds."""

    size: int
    written: int


class Store(Protocol):
    """What readers need, and the two ways in which small files appear."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What any call may raise when the disk or the service fails."""

    def url(self, name: str) -> str:
        """`name` as messages show it."""

    def read(self, name: str) -> bytes:
        """A whole small file; FileNotFoundError when there is none."""

    def open(self, name: str) -> Any:
        """A file to read at random; FileNotFoundError when there is none."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None when there is none."""

    def names(self, folder: str = "") -> list[str]:
        """What lies directly in `folder`, sorted; nothing when there is no such folder."""

    def committed(self) -> dict[str, Stamp]:
        """The folders of steps and packs that have a manifest."""

    def create(self, name: str, data: bytes) -> None:
        """Make a file, all at once and durably; FileExistsError when it exists. Of several racers one succeeds."""

    def replace(self, name: str, data: bytes) -> None:
        """The same, in place of an older file if there is one."""

    def remove(self, name: str) -> None:
        """Delete a file or a folder with all in it; nothing when there is none."""

    def litter(self, older_than_s: float, folder: str | None = None) -> list[str]:
        """Parts outside of staging that no manifest lists and that are older than this, of one folder or of all."""


def open_store(root: Root) -> Store:
    """The store of a path, a `file://` URL, or the URL of an object store such as `s3://bucket/traces`."""
    scheme = urlsplit(str(root)).scheme if "://" in str(root) else ""
    if scheme in ("", "file"):
        return LocalStore(local_path(root))
    from storage.object_store import ObjectStore

    return ObjectStore.from_url(str(root))


def is_remote(root: Root) -> bool:
    """Whether `root` is the URL of an object store."""
    return "://" in str(root) and urlsplit(str(root)).scheme != "file"


def local_path(root: Root) -> Path:
    """The directory of a path or a `file://` URL."""
    return Path(unquote(urlsplit(str(root)).path)) if str(root).startswith("file://") else Path(root)


class LocalStore:
    """A directory. Names never lead out of it, nor do symbolic links: those are DamagedDataError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self.root.absolute(),)  # whoever unpickles it may work in another directory

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """See `Store`."""
        return (OSError,)

    def path(self, name: str) -> Path:
        """The file of `name`; DamagedDataError when it, or a directory on the way to it, is a symbolic link."""
        parts = PurePosixPath(name).parts
        if ".." in parts or PurePosixPath(name).is_absolute():
            raise ValueError(f"{name!r} leads out of the dataset {self.root}")
        refuse_links(self.root, name)
        return self.root / name

    def url(self, name: str) -> str:
        """See `Store`."""
        return str(self.root / name)

    def read(self, name: str) -> bytes:
        """See `Store`."""
        return self.path(name).read_bytes()

    def open(self, name: str) -> pa.NativeFile:
        """See `Store`. Not mapped into memory: a file cut short while it is read must be an error, not a signal."""
        return pa.OSFile(str(self.path(name)))

    def size(self, name: str) -> int | None:
        """See `Store`."""
        with suppress(FileNotFoundError):
            status = os.stat(self.path(name))
            return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def names(self, folder: str = "") -> list[str]:
        """See `Store`."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.path(folder)))
        return []

    def committed(self) -> dict[str, Stamp]:
        """See `Store`. Looks again until no folder came or went meanwhile: a pack may have replaced steps. Links are
        listed, not followed, and so are folders that we may not look into: whoever reads what they name is told."""
        found: dict[str, Stamp] = {}
        folders, before = self._folders(), [("", False)]
        while folders != before:
            found = {}
            for name, is_link in folders:
                with suppress(FileNotFoundError, NotADirectoryError):
                    found[name] = self._stamp(name, is_link)
            folders, before = self._folders(), folders
        return found

    def _stamp(self, name: str, is_link: bool) -> Stamp:
        try:
            status = os.lstat(f"{self.root}/{name}" if is_link else f"{self.root}/{name}/{MANIFEST_FILE}")
        except PermissionError:
            status = os.lstat(f"{self.root}/{name}")
        return Stamp(status.st_size, status.st_mtime_ns)

    def _folders(self) -> list[tuple[str, bool]]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root) as entries:
            return sorted((entry.name, entry.is_symlink()) for entry in entries if is_folder(entry.name))
        return []

    def create(self, name: str, data: bytes) -> None:
        """See `Store`. Written under `_staging`, linked into place."""
        with staging_lock(self.root):
            with self._temporary(data) as temporary:
                self.path(name).parent.mkdir(parents=True, exist_ok=True)
                os.link(temporary, self.path(name))
            self._sync_parents(name)

    def replace(self, name: str, data: bytes) -> None:
        """See `Store`. Written under `_staging`, renamed into place."""
        with staging_lock(self.root):
            with self._temporary(data) as temporary:
                self.path(name).parent.mkdir(parents=True, exist_ok=True)
                os.rename(temporary, self.path(name))
            self._sync_parents(name)

    @contextmanager
    def _temporary(self, data: bytes) -> Iterator[Path]:
        """A file in `_staging` that holds `data`; gone afterwards, whether it was moved or anything failed."""
        temporary = new_entry(self.root, "file")
        try:
            write_durably(temporary, data)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """See `Store`. A folder is first renamed into `_staging`: no reader sees half of one."""
        path = self.path(name)
        with staging_lock(self.root), suppress(FileNotFoundError):
            doomed = new_entry(self.root, "dropped")
            os.rename(path, doomed)
            fsync_directory(path.parent)
            remove_entry(doomed)

    def litter(self, older_than_s: float, folder: str | None = None) -> list[str]:
        """See `Store`. A folder appears here with its manifest, so there are none."""
        return []

    def _sync_parents(self, name: str) -> None:
        """Of every directory between the file and the root: one that is there may be of a writer that died before its
        name was on disk."""
        for parent in PurePosixPath(name).parents:
            fsync_directory(self.root / parent)
