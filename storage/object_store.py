"""A dataset in an object store: parts first, then one conditional put of the manifest. Needs `pip install obstore`.

Object stores have no rename and no lock. What they have is a put that succeeds only if the name is free
(`If-None-Match: *`): the manifest's is the commit, and of several racers exactly one wins it. Credentials, region and
endpoint come from where the store's own tools find them, such as AWS_REGION and AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from storage.manifest import MANIFEST_FILE, is_folder, read_manifest, step_of_folder
from storage.store import Stamp

MANIFEST = f"/{MANIFEST_FILE}"


class ObjectStore:
    """See `storage.store.Store`. `client` is an obstore store whose root is the dataset.

    >>> store = ObjectStore.from_url("s3://bucket/traces")      # also gs://, az://, memory://
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client, self._url, self._pid = client, url.rstrip("/"), os.getpid()
        self._own = False

    @property
    def client(self) -> Any:
        """The obstore store. RuntimeError in a fork of the process that made it: its threads are not there, and every
        call would wait for them for ever."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._url} was opened by process {self._pid}, of which this one, {os.getpid()}, is a fork: its "
                'client would hang here. Start a new process, as DataLoader(..., multiprocessing_context="spawn") does'
            )
        return self._client

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """See `Store`. What obstore raises is no OSError unless a file is not there, or there already."""
        from obstore.exceptions import BaseError

        return OSError, BaseError

    def __reduce__(self) -> tuple[Any, ...]:
        """A store made from a URL is made from it again; credentials come from where that process finds them."""
        if self._url.startswith("memory:"):
            raise TypeError(
                f"{self._url} lies in the memory of this process and cannot be pickled; use s3:// or a path"
            )
        return (type(self).from_url, (self._url,)) if self._own else (type(self), (self.client, self._url))

    @classmethod
    def from_url(cls, url: str) -> ObjectStore:
        """ImportError, saying what to install, without obstore; ValueError for a scheme it does not know."""
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise ImportError(f"{url} needs the object store client: pip install 'moe-rollout[objects]'") from error
        try:
            store = cls(from_url(url), url)
        except BaseError as error:
            raise ValueError(f"{url} is no URL of an object store: {error}") from error
        store._own = True
        return store

    def url(self, name: str) -> str:
        """See `Store`."""
        return f"{self._url}/{name}".rstrip("/")

    def read(self, name: str) -> bytes:
        """See `Store`."""
        return bytes(self.client.get(name).bytes())

    def open(self, name: str) -> pa.NativeFile:
        """See `Store`."""
        size = self.client.head(name)["size"]
        return pa.PythonFile(_Ranges(self, name, size), mode="r")

    def size(self, name: str) -> int | None:
        """See `Store`."""
        try:
            return int(self.client.head(name)["size"])
        except FileNotFoundError:
            return None

    def names(self, folder: str = "") -> list[str]:
        """See `Store`."""
        found = self.client.list_with_delimiter(folder or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def committed(self) -> dict[str, Stamp]:
        """See `Store`. Lists every object: what is committed is what has a manifest, and only a listing knows. It comes
        in pages, packs first: a pack that was not there yet may have replaced steps that are gone from a later page."""
        stamps = self._stamps()
        while any(self.size(name + MANIFEST) is not None for name in self._packs() - stamps.keys()):
            stamps = self._stamps()
        return stamps

    def _packs(self) -> set[str]:
        return {name for name in self.names() if is_folder(name) and step_of_folder(name) is None}

    def _stamps(self) -> dict[str, Stamp]:
        stamps = {}
        for entry in self._list():
            folder = entry["path"].removesuffix(MANIFEST)
            if folder != entry["path"] and is_folder(folder):
                stamps[folder] = Stamp(entry["size"], int(entry["last_modified"].timestamp() * 1e9))
        return stamps

    def create(self, name: str, data: bytes) -> None:
        """See `Store`: a put on the condition that there is no such object."""
        from obstore.exceptions import AlreadyExistsError

        try:
            self.client.put(name, data, mode="create")
        except AlreadyExistsError as error:
            raise FileExistsError(errno.EEXIST, "already there", self.url(name)) from error

    def replace(self, name: str, data: bytes) -> None:
        """See `Store`."""
        self.client.put(name, data)

    def remove(self, name: str) -> None:
        """See `Store`. The manifest goes first: what has none is not committed."""
        paths = [entry["path"] for entry in self._list(name)] or [name]
        for path in sorted(paths, key=lambda path: not path.endswith(MANIFEST)):
            if self.size(path) is not None:
                self.client.delete(path)

    def litter(self, older_than_s: float, folder: str | None = None) -> list[str]:
        """See `Store`."""
        until = datetime.now(UTC) - timedelta(seconds=older_than_s)
        parts = [entry["path"] for entry in self._list(folder) if entry["last_modified"] <= until]
        parts = [path for path in parts if path.endswith(".parquet") and is_folder(path.partition("/")[0])]
        stamps = self.committed()
        folders = {path.partition("/")[0] for path in parts} & stamps.keys()
        listed = {f"{name}/{file.path}" for name in folders for file in read_manifest(self, name).files}
        return sorted(set(parts) - listed)

    def _list(self, folder: str | None = None) -> Iterator[Any]:
        for batch in self.client.list(folder):
            yield from batch


class _Ranges(io.RawIOBase):
    """Reads an object by ranges."""

    def __init__(self, store: ObjectStore, name: str, size: int) -> None:
        self._store, self._name, self._size, self._at = store, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        if end <= self._at:
            return b""
        data = bytes(self._store.client.get_range(self._name, start=self._at, end=end))
        self._at += len(data)
        return data
