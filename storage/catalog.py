"""Which steps are committed, and in which rows of which files their samples lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

from storage.errors import MissingDataError
from storage.index import Index
from storage.manifest import Manifest, PartFile, read_manifest, step_of_folder
from storage.retention import first_kept_step
from storage.store import Root, Stamp, Store, open_store

MANIFESTS_IN_MEMORY = 256
T = TypeVar("T")


class Place(NamedTuple):
    """Rows `[start, stop)` of the part file `name`, relative to the dataset."""

    name: str
    file: PartFile
    start: int
    stop: int

    @property
    def folder(self) -> str:
        """The folder of the file."""
        return self.name.partition("/")[0]

    @property
    def sample_ids(self) -> list[str]:
        """The samples in these rows."""
        return self.file.sample_ids[self.start : self.stop]


class Rows(NamedTuple):
    """The same without the sample ids, which are most of a manifest."""

    name: str
    start: int
    stop: int


class Catalog:
    """The committed steps of a dataset as they were at the last `refresh`. Manifests are read when needed. A
    pickled one takes along what it knows of the steps; manifests and index it reads again.

    >>> catalog = Catalog(open_store("traces/"))
    >>> catalog.steps, catalog.folder(1)
    ([0, 1], 'step-000000001')
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._cached = lru_cache(MANIFESTS_IN_MEMORY)(self._read)
        self._rows: dict[int, tuple[str, Stamp, list[Rows]]] = {}
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cached"} | {"_index": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._cached = lru_cache(MANIFESTS_IN_MEMORY)(self._read)

    def refresh(self) -> None:
        """See what was committed, compacted or dropped since. A pack replaces the folders of its steps, and an archive
        also the packs of them."""
        try:
            self._look()
        except MissingDataError:  # a pack was there and has been archived or dropped since
            self._look()

    def _look(self) -> None:
        self._stamps = self.store.committed()
        self._index: Index | None = None
        self.first_step = first = first_kept_step(self.store)
        own = {step: name for name in self._stamps if (step := step_of_folder(name)) is not None}
        packs = sorted(self._stamps.keys() - own.values(), key=lambda name: (self.manifest(name).archive, name))
        packed = {step: name for name in packs for step, _ in self.manifest(name).steps}
        self._folders = {step: name for step, name in (own | packed).items() if step >= first}
        self.superseded = [name for step, name in own.items() if step in packed or step < first]
        self.superseded += [name for name in packs if name not in self._folders.values()]
        self.steps = sorted(self._folders)
        self._rows = {step: rows for step, rows in self._rows.items() if step in self._folders}

    def __contains__(self, step: object) -> bool:
        return step in self._folders

    def folder(self, step: int) -> str:
        """The folder that holds `step`."""
        return self._folders[step]

    def stamp(self, folder: str) -> Stamp | None:
        """Of the manifest of a folder; None when there is none."""
        return self._stamps.get(folder)

    @property
    def folders(self) -> set[str]:
        """The folders that hold the steps."""
        return set(self._folders.values())

    def manifest(self, folder: str) -> Manifest:
        """The manifest of a folder, read once."""
        return self._cached(folder, self._stamps[folder])

    def places(self, step: int) -> Iterator[Place]:
        """Where the samples of `step` lie, in the order they were written."""
        folder = self.folder(step)
        for extent in self.manifest(folder).extents(step):
            yield Place(f"{folder}/{extent.file.path}", *extent)

    def rows(self, step: int) -> list[Rows]:
        """The same, remembered for every step that was asked for: whoever jumps between thousands of steps reads each
        manifest once."""
        folder = self.folder(step)
        stamp = self._stamps[folder]
        known = self._rows.get(step)
        if known is None or known[:2] != (folder, stamp):
            places = [Rows(place.name, place.start, place.stop) for place in self.places(step)]
            known = self._rows[step] = folder, stamp, places
        return known[2]

    def sample_ids(self, step: int) -> list[str]:
        """The samples of `step`, in the order they were written."""
        return [sample_id for place in self.places(step) for sample_id in place.sample_ids]

    def num_samples(self) -> int:
        """Samples of all steps; a manifest is read only where the index does not know it as it is now."""
        return self.retry(lambda: sum(self.counts(self.steps)))

    def counts(self, steps: Sequence[int]) -> list[int]:
        """Samples of each of the steps; a manifest is read only where the index does not know it as it is now."""
        index, counts = self.index(), []
        for folder, group in groupby(steps, self.folder):
            if step_of_folder(folder) is not None:
                known = index.samples.get(folder)
                counts += [self._count(step) if known is None else known for step in group]
            else:
                listed = dict(self.manifest(folder).steps)
                counts += [listed[step] for step in group]
        return counts

    def _count(self, step: int) -> int:
        return sum(rows.stop - rows.start for rows in self.rows(step))

    def find(self, sample_id: str) -> tuple[str, int, int] | None:
        """The file of a sample, its row in it, and its step. What an index says is looked up in the manifest."""
        for step in self._candidates(sample_id):
            for place in self.places(step):
                if sample_id in place.sample_ids:
                    return place.name, place.file.sample_ids.index(sample_id, place.start), step
        return None

    def retry(self, read: Callable[[], T]) -> T:
        """What `read` returns; if it misses a file, once more after a refresh: steps may have been compacted since."""
        try:
            return read()
        except MissingDataError:
            self.refresh()
            return read()

    def index(self) -> Index:
        """The index, without what it says about manifests that have changed since."""
        if self._index is None:
            self._index = Index.load(self.store, self._stamps)
        return self._index

    def build_index(self) -> None:
        """Write an index of every manifest that is here now; see storage/index.py."""
        Index.of({name: self.manifest(name) for name in self.folders}, self._stamps).save(self.store)
        self._index = None

    def _candidates(self, sample_id: str) -> Iterator[int]:
        """First the step that the id names (`run/step/prompt/j`), then those whose hashes match, then the unknown."""
        parts = sample_id.split("/")
        hint = int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() and len(parts[1]) < 19 else -1
        if hint in self:
            yield hint
        index = self.index()
        folders = index.folders_with(sample_id)
        possible = [step for step in self.steps if step != hint]
        yield from (step for step in possible if self.folder(step) in folders)
        yield from (step for step in possible if self.folder(step) not in index.samples)

    def _read(self, folder: str, stamp: Stamp) -> Manifest:
        return read_manifest(self.store, folder)


def committed_steps(root: Root) -> list[int]:
    """Steps that readers can see in the dataset at `root`, ascending."""
    return Catalog(open_store(root)).steps
