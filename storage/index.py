"""`_index.arrow`: what many manifests say, in one file that is mapped into memory. A cache, never the truth.

For each folder its number of samples and the stamp of its manifest; for each sample 64 bits of a hash and its
folder, sorted by hash. An entry whose manifest has another stamp is not used, a sample that a hash points to is
looked up in the manifest, and a file that is damaged or of another version counts as absent.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage.manifest import Manifest
from storage.schema import FORMAT_VERSION
from storage.store import Stamp, Store

logger = logging.getLogger(__name__)
INDEX_FILE = "_index.arrow"
_FOLDERS = ("folder", "samples", "size", "written")
_HASHES = ("hash", "owner")
_KEY = b"moe_rollout.index"
_COLUMNS = (*_FOLDERS, *_HASHES)


@dataclass
class Index:
    """`samples` counts those of each folder that is known as it is now."""

    samples: dict[str, int]
    hashes: np.ndarray  # uint64, ascending
    owners: np.ndarray  # int32, a position in `folders`
    folders: list[str]
    stamps: dict[str, Stamp]

    @classmethod
    def of(cls, manifests: Mapping[str, Manifest], stamps: Mapping[str, Stamp]) -> Index:
        """An index of these folders."""
        folders = sorted(manifests)
        ids = {folder: manifests[folder].sample_ids for folder in folders}
        hashes = np.array([_hash(sample_id) for folder in folders for sample_id in ids[folder]], np.uint64)
        owners = np.repeat(np.arange(len(folders), dtype=np.int32), [len(ids[folder]) for folder in folders])
        order = np.argsort(hashes, kind="stable")
        samples = {folder: len(ids[folder]) for folder in folders}
        return cls(samples, hashes[order], owners[order], folders, {folder: stamps[folder] for folder in folders})

    def folders_with(self, sample_id: str) -> set[str]:
        """Folders that may hold the sample; one whose manifest has changed is not among them."""
        key = np.uint64(_hash(sample_id))
        start, stop = np.searchsorted(self.hashes, key, "left"), np.searchsorted(self.hashes, key, "right")
        return {self.folders[owner] for owner in self.owners[start:stop]} & self.samples.keys()

    def save(self, store: Store) -> None:
        """Write it, in place of an older one."""
        stamps = [self.stamps[folder] for folder in self.folders]
        sizes, written = [stamp.size for stamp in stamps], [stamp.written for stamp in stamps]
        counts = [self.samples[folder] for folder in self.folders]
        lists = [self.folders, counts, sizes, written, self.hashes, self.owners]
        batch = pa.record_batch([_one_row(pa.array(values)) for values in lists], names=_COLUMNS)
        sink = pa.BufferOutputStream()
        schema = batch.schema.with_metadata({_KEY: f"{FORMAT_VERSION} {_checksum(batch)}"})
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        store.replace(INDEX_FILE, sink.getvalue().to_pybytes())

    @classmethod
    def load(cls, store: Store, stamps: Mapping[str, Stamp]) -> Index:
        """The stored index, restricted to folders whose manifests still have the stamps they had."""
        try:
            batch = pa.ipc.open_file(pa.py_buffer(store.read(INDEX_FILE))).get_batch(0)
            if batch.schema.metadata != {_KEY: f"{FORMAT_VERSION} {_checksum(batch)}".encode()}:
                raise ValueError("its checksum is wrong, or another release wrote it")
            return cls._parse(batch, stamps)
        except FileNotFoundError:
            return cls.of({}, {})
        except (OSError, ValueError, KeyError, IndexError, pa.ArrowException) as error:
            logger.warning("%s is not used (%s); build_index() writes a new one", store.url(INDEX_FILE), error)
            return cls.of({}, {})

    @classmethod
    def _parse(cls, batch: pa.RecordBatch, stamps: Mapping[str, Stamp]) -> Index:
        folders, counts, sizes, written = (batch.column(name)[0].as_py() for name in _FOLDERS)
        hashes, owners = (batch.column(name).flatten().to_numpy() for name in _HASHES)
        old = {name: Stamp(*pair) for name, *pair in zip(folders, sizes, written, strict=True)}
        known = {name: count for name, count in zip(folders, counts, strict=True) if stamps.get(name) == old[name]}
        return cls(known, hashes, owners, folders, old)


def _hash(sample_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _one_row(values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _checksum(batch: pa.RecordBatch) -> int:
    crc = 0
    for column in batch.columns:
        for buffer in column.buffers():
            crc = zlib.crc32(buffer, crc) if buffer is not None else crc
    return crc
