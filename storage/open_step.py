"""A step that is being written: part files and a manifest in a staging directory, published by one rename."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa

from storage.durable import fsync_directory, write_durably
from storage.manifest import MANIFEST_FILE, Manifest, PartFile
from storage.part import ROW_GROUP_SAMPLES, PartWriter
from storage.schema import trace_schema
from storage.staging import StagingDirectory
from storage.trace import RoutingSpec


class OpenStep:
    """Staged files get their `.parquet` suffix last, so that `**/*.parquet` does not find them."""

    def __init__(self, root: Path, step: int, spec: RoutingSpec, max_part_bytes: int) -> None:
        self.sample_ids: set[str] = set()
        self._step = step
        self._schema = trace_schema(spec)
        self._max_part_bytes = max_part_bytes
        self._files: list[PartFile] = []
        self._part: PartWriter | None = None
        self._staging = StagingDirectory(root, f"{step:09d}")

    def write(self, table: pa.Table) -> None:
        """Append the rows of `table`, starting a new part file whenever one is large enough."""
        for start in range(0, len(table), ROW_GROUP_SAMPLES):
            part = self._part = self._part or PartWriter(self._staged_part(len(self._files)), self._schema)
            part.write(table.slice(start, ROW_GROUP_SAMPLES))
            if part.bytes_written >= self._max_part_bytes:
                self._close_part(part)
        self.sample_ids.update(table.column("sample_id").to_pylist())

    def seal(self) -> None:
        """Close the files and write the manifest; all of it is on disk afterwards."""
        if self._part is not None:
            self._close_part(self._part)
        write_durably(self._staging.path / MANIFEST_FILE, Manifest.of_step(self._step, self._files).to_json())

    def publish(self, target: Path) -> None:
        """Appear at `target`. FileExistsError when something is there."""
        for index, file in enumerate(self._files):
            self._staged_part(index).rename(self._staging.path / file.path)
        fsync_directory(self._staging.path)
        try:
            self._staging.publish(target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(errno.EEXIST, "already there", str(target)) from error
            raise

    def remove(self) -> None:
        """Drop everything staged."""
        if self._part is not None:
            self._part.discard()
        self._staging.remove()

    def _close_part(self, part: PartWriter) -> None:
        part.close()
        self._files.append(part.manifest_entry(f"part-{len(self._files):05d}.parquet"))
        self._part = None

    def _staged_part(self, index: int) -> Path:
        return self._staging.path / f"part-{index:05d}.staging"
