"""Which samples are committed: what keeps a sample_id from being written twice."""

from __future__ import annotations

import logging

from storage.catalog import Catalog
from storage.errors import DatasetError

logger = logging.getLogger(__name__)

FOLDERS_WITHOUT_INDEX = 64


class CommittedSamples:
    """The samples that a catalog knows, in memory only where the index of the dataset does not know them.

    >>> CommittedSamples(catalog).step_of("run/7/0-0/0")
    7
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._index = catalog.index()
        self._seen: set[str] = set()
        self._steps: dict[str, int] = {}

    def refresh(self) -> None:
        """See what was committed since."""
        self._catalog.refresh()
        self._catalog.retry(self._add_new)

    def _add_new(self) -> None:
        for step in self._catalog.steps:
            folder = self._catalog.folder(step)
            if folder not in self._index.samples and folder not in self._seen:
                self._steps.update(dict.fromkeys(self._catalog.sample_ids(step), step))
        self._seen = self._catalog.folders

    def step_of(self, sample_id: str) -> int | None:
        """The step that holds the sample, as of the last `refresh`."""
        if sample_id in self._steps:
            return self._steps[sample_id]
        folders = self._index.folders_with(sample_id) & self._catalog.folders
        manifests = (self._catalog.manifest(folder) for folder in folders)
        found = (step for m in manifests for step, _ in m.steps for e in m.extents(step) if sample_id in e.sample_ids)
        return next(found, None)

    def save_index(self) -> None:
        """Renew the index when many folders are missing in it. A failure is logged: the index is a cache."""
        try:
            self.refresh()
            if len(self._catalog.folders - self._index.samples.keys()) >= FOLDERS_WITHOUT_INDEX:
                self._catalog.build_index()
        except (OSError, DatasetError) as error:
            logger.warning("the index was not renewed: %s", error)
