"""A folder that is being written: part files and a manifest, invisible until `publish`."""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from storage.archive import ARCHIVE_LEVEL, archive_schema, to_archive
from storage.durable import fsync_directory, write_durably
from storage.manifest import MANIFEST_FILE, Manifest, PartFile
from storage.part import ROW_GROUP_SAMPLES, Compression, DigestFile, PartWriter
from storage.schema import trace_schema
from storage.staging import StagingDirectory
from storage.store import LocalStore, Store
from storage.trace import RoutingSpec


@dataclass(frozen=True)
class Parts:
    """Closed part files, relative to the dataset in `folder`, that no manifest lists yet."""

    folder: str
    files: list[PartFile]

    @property
    def sample_ids(self) -> set[str]:
        """All samples in them."""
        return {sample_id for file in self.files for sample_id in file.sample_ids}


class Place(Protocol):
    """Where the files of an open folder go: a staging directory, or the object store itself."""

    @property
    def folder(self) -> str:
        """Where they lie before the commit, relative to the dataset."""

    def lend(self) -> None:
        """From now on another place may adopt the parts, and commit them without a word to this one."""

    def adopt(self, folder: str, name: str, index: int) -> str:
        """Take the closed part `name` of another place, which lies in its `folder`; the name it has here."""

    def new_part(self, index: int) -> tuple[str, DigestFile]:
        """The final name of a part, and a file to write it to."""

    def seal(self, manifest: bytes) -> None:
        """Prepare the commit with this manifest."""

    def publish(self) -> None:
        """Commit, atomically; FileExistsError when there is such a folder."""

    def settle(self) -> None:
        """Wait until the commit survives power loss."""

    def remove(self) -> None:
        """Drop what was written."""

    def release(self) -> None:
        """Leave alone what another place has adopted."""


class OpenFolder:
    """Parts of a step or of a pack, one row group in memory; with `archive` in the layout of storage/archive.py."""

    def __init__(
        self,
        place: Place,
        spec: RoutingSpec,
        max_part_bytes: int,
        compression: Compression = "zstd",
        *,
        archive: bool = False,
    ) -> None:
        self.sample_ids: set[str] = set()
        self._place, self._spec, self._archive = place, spec, archive
        self._schema = archive_schema(spec) if archive else trace_schema(spec)
        self._max_part_bytes, self._compression = max_part_bytes, compression
        self._level = ARCHIVE_LEVEL if archive else 1
        self._files: list[PartFile] = []
        self._part: tuple[str, PartWriter] | None = None

    def write(self, table: pa.Table) -> None:
        """Append the rows of `table`, starting a new part file whenever one is large enough."""
        for start in range(0, len(table), ROW_GROUP_SAMPLES):
            if self._part is None:
                name, file = self._place.new_part(len(self._files))
                self._part = name, PartWriter(file, self._schema, self._compression, self._level)
            rows = table.slice(start, ROW_GROUP_SAMPLES)
            self._part[1].write(to_archive(rows, self._spec) if self._archive else rows)
            if self._part[1].bytes_written >= self._max_part_bytes:
                self._close_part()
        self.sample_ids.update(table.column("sample_id").to_pylist())

    def close(self) -> Parts:
        """Close the files, for another folder to adopt them."""
        self._close_part()
        self._place.lend()
        return Parts(self._place.folder, self._files)

    def adopt(self, parts: Parts) -> None:
        """Add the closed files of another folder of the same step."""
        self._close_part()
        for file in parts.files:
            name = self._place.adopt(parts.folder, file.path, len(self._files))
            self._files.append(replace(file, path=name))
        self.sample_ids.update(parts.sample_ids)

    def seal(self, steps: list[tuple[int, int]]) -> None:
        """Close the files and prepare a manifest of these steps and their numbers of samples."""
        self._close_part()
        self._place.seal(Manifest(self._files, steps, self._archive).to_json().encode())

    def publish(self) -> None:
        """Appear; FileExistsError when something is there."""
        self._place.publish()

    def settle(self) -> None:
        """Wait until the commit survives power loss."""
        self._place.settle()

    def remove(self) -> None:
        """Drop everything written."""
        if self._part is not None:
            self._part[1].discard()
        self._place.remove()

    def release(self) -> None:
        """Leave alone the files, which another folder has adopted and committed."""
        self._place.release()

    def _close_part(self) -> None:
        if self._part is not None:
            name, part = self._part
            part.close()
            self._files.append(part.manifest_entry(name))
            self._part = None


class StagedPlace:
    """Staged files get their `.parquet` suffix last, so that `**/*.parquet` does not find them."""

    def __init__(self, root: Path, what: str, target: str) -> None:
        self._root, self._target = root, root / target
        self._parts: list[str] = []
        self._staging = StagingDirectory(root, what)

    def new_part(self, index: int) -> tuple[str, DigestFile]:
        """See `Place`."""
        self._parts.append(f"part-{index:05d}.parquet")
        return self._parts[-1], DigestFile.create(self._staged(self._parts[-1]))

    @property
    def folder(self) -> str:
        """See `Place`."""
        return str(self._staging.path.relative_to(self._root))

    def lend(self) -> None:
        """See `Place`: who adopts a part moves it away."""

    def adopt(self, folder: str, name: str, index: int) -> str:
        """See `Place`. The bytes were fsynced by whoever wrote them, the directory is before the commit."""
        self._parts.append(f"part-{index:05d}.parquet")
        (self._root / folder / name).with_suffix(".staging").rename(self._staged(self._parts[-1]))
        return self._parts[-1]

    def seal(self, manifest: bytes) -> None:
        """See `Place`."""
        write_durably(self._staging.path / MANIFEST_FILE, manifest)

    def publish(self) -> None:
        """See `Place`."""
        for name in self._parts:
            self._staged(name).rename(self._staging.path / name)
        fsync_directory(self._staging.path)
        try:
            self._staging.publish(self._target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(errno.EEXIST, "already there", str(self._target)) from error
            raise

    def settle(self) -> None:
        """See `Place`."""
        fsync_directory(self._root)

    def remove(self) -> None:
        """See `Place`."""
        self._staging.remove()

    def release(self) -> None:
        """See `Place`. The files are gone from here, the directory is not."""
        self._staging.remove()

    def _staged(self, name: str) -> Path:
        return (self._staging.path / name).with_suffix(".staging")


def new_place(store: Store, what: str, target: str) -> Place:
    """A place for a folder that will be named `target`; `what` tells in `_staging` what it is."""
    if isinstance(store, LocalStore):
        return StagedPlace(store.root, what, target)
    from storage.object_place import ObjectPlace
    from storage.object_store import ObjectStore

    assert isinstance(store, ObjectStore)
    return ObjectPlace(store, target)
