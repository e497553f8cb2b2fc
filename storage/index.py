"""`_index.arrow`: what many manifests say, in one file that is mapped into memory. A cache, never the truth.

For each folder its number of samples and the stamp of its manifest; for each sample 64 bits of a hash and its
folder, sorted by hash. An entry whose manifest has another stamp is not used, a sample that a hash points to is
looked up in the manifest, and a file that is damaged, contradicts itself or is of another version counts as absent.
Whether it says what the manifests say only reading them can tell: `index_problems`, for verify.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from storage.errors import DatasetError
from storage.manifest import Manifest, read_manifest
from storage.schema import FORMAT_VERSION
from storage.store import Stamp, Store

logger = logging.getLogger(__name__)
INDEX_FILE = "_index.arrow"
_FOLDERS = {"folder": pa.string(), "samples": pa.int64(), "size": pa.int64(), "written": pa.int64()}
_HASHES = {"hash": pa.uint64(), "owner": pa.int32()}
_COLUMNS = _FOLDERS | _HASHES
_KEY = b"moe_rollout.index"
_UNUSABLE = (OSError, ValueError, KeyError, IndexError, MemoryError, pa.ArrowException)


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
        hashes = np.array([sample_hash(sample_id) for folder in folders for sample_id in ids[folder]], np.uint64)
        owners = np.repeat(np.arange(len(folders), dtype=np.int32), [len(ids[folder]) for folder in folders])
        order = np.argsort(hashes, kind="stable")
        samples = {folder: len(ids[folder]) for folder in folders}
        return cls(samples, hashes[order], owners[order], folders, {folder: stamps[folder] for folder in folders})

    def folders_with(self, sample_id: str) -> set[str]:
        """Folders that may hold the sample; one whose manifest has changed is not among them."""
        key = np.uint64(sample_hash(sample_id))
        start, stop = np.searchsorted(self.hashes, key, "left"), np.searchsorted(self.hashes, key, "right")
        return {self.folders[owner] for owner in self.owners[start:stop]} & self.samples.keys()

    def save(self, store: Store) -> None:
        """Write it, in place of an older one."""
        stamps = [self.stamps[folder] for folder in self.folders]
        sizes, written = [stamp.size for stamp in stamps], [stamp.written for stamp in stamps]
        counts = [self.samples[folder] for folder in self.folders]
        lists = [self.folders, counts, sizes, written, self.hashes, self.owners]
        columns = [_one_row(pa.array(values, kind)) for values, kind in zip(lists, _COLUMNS.values(), strict=True)]
        batch = pa.record_batch(columns, names=list(_COLUMNS))
        sink = pa.BufferOutputStream()
        schema = batch.schema.with_metadata({_KEY: f"{FORMAT_VERSION} {_checksum(batch)}"})
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
        store.replace(INDEX_FILE, sink.getvalue().to_pybytes())

    @classmethod
    def load(cls, store: Store, stamps: Mapping[str, Stamp]) -> Index:
        """The stored index, restricted to folders whose manifests still have the stamps they had."""
        try:
            return cls.read(store, stamps)
        except FileNotFoundError:
            return cls.of({}, {})
        except _UNUSABLE as error:
            logger.warning("%s is not used (%s); build_index() writes a new one", store.url(INDEX_FILE), error)
            return cls.of({}, {})

    @classmethod
    def read(cls, store: Store, stamps: Mapping[str, Stamp]) -> Index:
        """The same; raises where `load` takes the file for absent."""
        batch = pa.ipc.open_file(pa.py_buffer(store.read(INDEX_FILE))).get_batch(0)
        if batch.schema.metadata != {_KEY: f"{FORMAT_VERSION} {_checksum(batch)}".encode()}:
            raise ValueError("its checksum is wrong, or another release wrote it")
        batch.validate(full=True)
        found = {field.name: field.type for field in batch.schema}
        if found != {name: pa.list_(kind) for name, kind in _COLUMNS.items()} or batch.num_rows != 1:
            raise ValueError(f"it holds {batch.num_rows} rows of {found}")
        if any(column.null_count or column.flatten().null_count for column in batch.columns):
            raise ValueError("it holds nulls")
        return cls._parse(batch, stamps)

    @classmethod
    def _parse(cls, batch: pa.RecordBatch, stamps: Mapping[str, Stamp]) -> Index:
        folders, counts, sizes, written = (batch.column(name)[0].as_py() for name in _FOLDERS)
        hashes, owners = (batch.column(name).flatten().to_numpy() for name in _HASHES)
        if len(hashes) != len(owners) or (hashes[1:] < hashes[:-1]).any():
            raise ValueError("its hashes are not in order, or not one to an owner")
        if len(owners) and not 0 <= owners.min() <= owners.max() < len(folders):
            raise ValueError(f"it names an owner that is none of its {len(folders)} folders")
        if counts != np.bincount(owners, minlength=len(folders)).tolist() or len(set(folders)) != len(folders):
            raise ValueError("its counts are not those of its hashes, or it lists a folder twice")
        old = {name: Stamp(*pair) for name, *pair in zip(folders, sizes, written, strict=True)}
        known = {name: count for name, count in zip(folders, counts, strict=True) if stamps.get(name) == old[name]}
        return cls(known, hashes, owners, folders, old)

    def by_folder(self) -> dict[str, np.ndarray]:
        """The hashes of each folder, ascending."""
        ends = np.cumsum(np.bincount(self.owners, minlength=len(self.folders)))[:-1]
        parts = np.split(self.hashes[np.argsort(self.owners, kind="stable")], ends)
        return dict(zip(self.folders, parts, strict=True)) if self.folders else {}


def index_problems(store: Store) -> Iterator[str]:
    """What makes the index useless, or where it is not what the manifests say. Reads the manifests it knows."""
    url, remedy = store.url(INDEX_FILE), "build_index() writes a new one"
    stamps = store.committed()
    try:
        index = Index.read(store, stamps)
    except FileNotFoundError:
        return
    except _UNUSABLE as error:
        yield f"{url}: is not used ({error}); {remedy}"
        return
    hashes = index.by_folder()
    for folder in sorted(index.samples):
        try:
            manifest = read_manifest(store, folder)
        except DatasetError:  # it has a problem of its own, or was compacted since
            continue
        expected = Index.of({folder: manifest}, stamps).hashes
        if not np.array_equal(hashes[folder], expected):
            yield f"{url}: lists other samples of {folder} than its manifest; remove it, {remedy}"


def sample_hash(sample_id: str) -> int:
    """64 bits that stand for a sample id."""
    return int.from_bytes(hashlib.blake2b(sample_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _one_row(values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _checksum(batch: pa.RecordBatch) -> int:
    crc = 0
    for column in batch.columns:
        for buffer in column.buffers():
            crc = zlib.crc32(buffer, crc) if buffer is not None else crc
    return crc
