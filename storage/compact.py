"""Merge many small steps into packs, archive cold ones, and delete what nobody reads any more. Readers see the old or
the new."""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

from storage.annotations import drop_annotations
from storage.catalog import Catalog, Place
from storage.errors import DamagedDataError
from storage.manifest import read_spec, step_of_folder
from storage.open_folder import OpenFolder, new_place
from storage.part_reader import PartReader
from storage.retention import first_kept_step
from storage.staging import rewriting, staging_lock
from storage.store import LocalStore, Store
from storage.trace import RoutingSpec

logger = logging.getLogger(__name__)


def compact(store: Store, max_bytes: int) -> list[str]:
    """Merge neighbouring steps while their files stay within `max_bytes` together; returns the names of the packs.

    A pack is published like a step, under a name of its own, and only then the folders of its steps are deleted. Cut
    off in between, readers prefer the pack, and the next call deletes the rest.
    """
    spec = read_spec(store)
    with rewriting(store.root) if isinstance(store, LocalStore) else nullcontext():
        catalog = Catalog(store)
        packs = [_pack(store, catalog, spec, steps, max_bytes) for steps in _runs(catalog, max_bytes)]
        remove_superseded(store)
    return packs


def archive(store: Store, before: int, max_bytes: int) -> list[str]:
    """Rewrite steps below `before` in the layout of storage/archive.py, merged while they stay within `max_bytes`.

    Published like a pack and preferred to the folders and packs it was made from, which are then deleted. Archives, and
    packs that reach `before`, stay as they are. Returns the names of the new packs.
    """
    spec = read_spec(store)
    with rewriting(store.root) if isinstance(store, LocalStore) else nullcontext():
        catalog = Catalog(store)
        cold = _cold(catalog, before, max_bytes)
        packs = [_pack(store, catalog, spec, steps, max_bytes, archive=True) for steps in cold]
        remove_superseded(store)
    return packs


def remove_superseded(store: Store) -> None:
    """Delete folders whose steps are in a pack or an archive or were dropped, and the annotations of dropped steps."""
    for folder in Catalog(store).superseded:
        logger.info("removing %s: its steps are in a pack, or were dropped", store.url(folder))
        store.remove(folder)
    drop_annotations(store, first_kept_step(store))


def _runs(catalog: Catalog, max_bytes: int) -> Iterator[list[int]]:
    """Neighbouring steps, at least two, that lie in folders of their own and fit into one pack together."""
    run: list[int] = []
    size = 0
    for step in catalog.steps:
        folder = catalog.folder(step)
        bytes_ = sum(file.bytes for file in catalog.manifest(folder).files)
        fits = step_of_folder(folder) is not None and size + bytes_ <= max_bytes
        if not fits:
            if len(run) > 1:
                yield run
            run, size = [], 0
        if step_of_folder(folder) is not None and bytes_ <= max_bytes:
            run, size = [*run, step], size + bytes_
    if len(run) > 1:
        yield run


def _cold(catalog: Catalog, before: int, max_bytes: int) -> Iterator[list[int]]:
    """The steps of neighbouring folders below `before` that are no archive yet; one large folder may be alone."""
    steps_of: defaultdict[str, list[int]] = defaultdict(list)
    for step in catalog.steps:
        steps_of[catalog.folder(step)].append(step)
    run: list[int] = []
    size = 0
    for folder, steps in steps_of.items():
        manifest = catalog.manifest(folder)
        bytes_ = sum(file.bytes for file in manifest.files)
        stays = manifest.archive or steps[-1] >= before
        if run and (stays or size + bytes_ > max_bytes):
            yield run
            run, size = [], 0
        if not stays:
            run, size = run + steps, size + bytes_
    if run:
        yield run


def _pack(
    store: Store, catalog: Catalog, spec: RoutingSpec, steps: list[int], max_bytes: int, *, archive: bool = False
) -> str:
    name = f"pack-{min(steps):09d}-{max(steps):09d}-{uuid.uuid4().hex[:8]}"
    folder = OpenFolder(new_place(store, "pack", name), spec, max_bytes, archive=archive)
    try:
        for step in steps:
            _copy(store, catalog.places(step), spec, folder)
        folder.seal([(step, len(catalog.sample_ids(step))) for step in steps])
        with staging_lock(store.root) if isinstance(store, LocalStore) else nullcontext():
            folder.publish()
    except BaseException:
        folder.remove()
        raise
    folder.settle()
    logger.info("%s %d steps into %s", "archived" if archive else "packed", len(steps), store.url(name))
    return name


def _copy(store: Store, places: Iterable[Place], spec: RoutingSpec, target: OpenFolder) -> None:
    for place in places:
        with PartReader.open(store, place.name, spec) as part:
            found: list[str] = []
            for table in part.tables(place.start, place.stop):
                part.decode(table)  # checks every crc32: damage must not be copied
                found += table.column("sample_id").to_pylist()
                target.write(table)
        if found != place.sample_ids:
            raise DamagedDataError(f"{store.url(place.name)}: its sample_ids are not those in its manifest")
