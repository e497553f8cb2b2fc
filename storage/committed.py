"""Which samples are committed: what keeps a sample_id from being written twice."""

from __future__ import annotations

import logging

import numpy as np

from storage.catalog import Catalog
from storage.errors import DatasetError
from storage.index import sample_hash
from storage.store import Stamp

logger = logging.getLogger(__name__)

FOLDERS_WITHOUT_INDEX = 64


class CommittedSamples:
    """The samples that a catalog knows: 16 bytes in memory for each that the index of the dataset does not know.

    >>> CommittedSamples(catalog).step_of("run/7/0-0/0")
    7
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._index = catalog.index()
        self._seen: dict[int, Stamp | None] = {}  # of steps whose hashes are here
        self._hashes = np.zeros(0, np.uint64)  # ascending
        self._steps = np.zeros(0, np.int64)  # whose they are

    def refresh(self) -> None:
        """See what was committed since."""
        self._catalog.refresh()
        self._catalog.retry(self._add_new)

    def _add_new(self) -> None:
        self._forget_changed()
        known = self._index.samples
        new = [
            step for step in self._catalog.steps if step not in self._seen and self._catalog.folder(step) not in known
        ]
        if not new:
            return
        hashes = [np.array([*map(sample_hash, self._catalog.sample_ids(step))], np.uint64) for step in new]
        every = np.concatenate([self._hashes, *hashes])
        steps = np.concatenate([self._steps, np.repeat(np.array(new, np.int64), [len(part) for part in hashes])])
        order = np.argsort(every, kind="stable")
        self._hashes, self._steps = every[order], steps[order]
        self._seen |= {step: self._stamp(step) for step in new}

    def _forget_changed(self) -> None:
        """What is known of folders that are gone. A step that was removed may be written again, with other samples."""
        stamp_of, index = self._catalog.stamp, self._index
        index.samples = {name: count for name, count in index.samples.items() if stamp_of(name) == index.stamps[name]}
        kept = {step: stamp for step, stamp in self._seen.items() if self._stamp(step) == stamp}
        if len(kept) < len(self._seen):
            rows = np.isin(self._steps, list(kept))
            self._hashes, self._steps, self._seen = self._hashes[rows], self._steps[rows], kept

    def _stamp(self, step: int) -> Stamp | None:
        return self._catalog.stamp(self._catalog.folder(step)) if step in self._catalog else None

    def step_of(self, sample_id: str) -> int | None:
        """The step that holds the sample, as of the last `refresh`. What a hash points to is looked up."""
        key = np.uint64(sample_hash(sample_id))
        start, stop = np.searchsorted(self._hashes, key, "left"), np.searchsorted(self._hashes, key, "right")
        for step in self._steps[start:stop].tolist():
            if step in self._catalog and sample_id in self._catalog.sample_ids(step):
                return int(step)
        folders = self._index.folders_with(sample_id) & self._catalog.folders
        manifests = (self._catalog.manifest(folder) for folder in folders)
        found = (step for m in manifests for step, _ in m.steps for e in m.extents(step) if sample_id in e.sample_ids)
        return next(found, None)

    def save_index(self) -> None:
        """Renew the index when many folders are missing in it. A failure is logged: the index is a cache."""
        failures: tuple[type[Exception], ...] = (DatasetError, *self._catalog.store.errors)
        try:
            self.refresh()
            if len(self._catalog.folders - self._index.samples.keys()) >= FOLDERS_WITHOUT_INDEX:
                self._catalog.build_index()
        except failures as error:
            logger.warning("the index was not renewed: %s", error)
