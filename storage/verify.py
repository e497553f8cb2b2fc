"""Check a dataset against manifests, checksums and the route contract. Repair removes only what was never committed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from storage.annotations import annotation_files, read_annotation
from storage.card import card_problems
from storage.catalog import Catalog, Place
from storage.errors import DatasetError
from storage.index import index_problems
from storage.links import link_problem, links_below
from storage.manifest import MANIFEST_FILE, Manifest, PartFile, is_folder, read_manifest, read_spec
from storage.part_reader import PartReader
from storage.staging import clean_staging, dead_staging, foreign_staging
from storage.store import LocalStore, Root, Store, open_store
from storage.trace import RoutingSpec

LITTER_AGE_S = 86_400.0


def verify_dataset(root: Root) -> list[str]:
    """Every problem of the dataset at `root`, one text each, naming the file and where possible the sample.

    Looks at size and sha256 of each file, page checksums, each sample's crc32, row rule and expert ids,
    the spec, manifests against files, sample_ids that appear twice, annotations, the index,
    run.json, symbolic links, and what dead writers left: those of this host, and those of others of which nothing was
    written for an hour. Damaged data never raises.

    >>> verify_dataset("traces/")
    ['traces/step-000000000/part-00000.parquet: has 9120 bytes, its manifest says 9121']

    Raises:
        FileNotFoundError: when there is no dataset.
    """
    store = open_store(root)
    try:
        spec = read_spec(store)
    except DatasetError as error:
        return [str(error)]
    links = _link_problems(store)
    found = [*_folder_problems(store, spec), *_strays(store), *index_problems(store), *card_problems(store)]
    return [*links, *(problem for problem in found if not any(link in problem for link in links))]


def repair_dataset(root: Root, *, all_hosts: bool = False) -> list[str]:
    """Remove what was never committed and return its paths. Damage to committed data stays for you to judge.

    Local: what dead writers of this host left in `_staging`; with `all_hosts=True`, for when no writer of another host
    is at work, what any left. Object store, where nobody knows whether a writer lives:
    parts that no manifest lists and that are older than `LITTER_AGE_S`, a day; no step may stay open for longer.

    Raises:
        ValueError: `all_hosts` for an object store.
    """
    store = open_store(root)
    read_spec(store)
    if isinstance(store, LocalStore):
        return [str(path) for path in clean_staging(store.root, all_hosts=all_hosts)]
    if all_hosts:
        raise ValueError(f"{root} is an object store, whose parts carry no host: repair it without all_hosts")
    litter = store.litter(LITTER_AGE_S)
    for name in litter:
        store.remove(name)
    return [store.url(name) for name in litter]


def _link_problems(store: Store) -> list[str]:
    """Found by a walk, so that they are named wherever they lie; whoever reads through one finds it a second time."""
    return [link_problem(path) for path in links_below(store.root)] if isinstance(store, LocalStore) else []


def _folder_problems(store: Store, spec: RoutingSpec) -> Iterator[str]:
    owner: dict[str, int] = {}
    superseded, owning = _readers_choice(store)
    for folder in sorted(store.committed().keys() - superseded):
        try:
            manifest = read_manifest(store, folder)
        except DatasetError as error:
            yield str(error)
            continue
        for file in manifest.files:
            yield from _file_problems(store, Place(f"{folder}/{file.path}", file, 0, file.rows), spec, manifest)
            yield from _step_problems(store, folder, file, manifest, spec)
        for step in [step for step, _ in manifest.steps if owning.get(step, folder) == folder]:
            for sample_id in (sample_id for extent in manifest.extents(step) for sample_id in extent.sample_ids):
                if sample_id in owner:
                    yield f"{store.url(folder)}: sample {sample_id!r} is in step {owner[sample_id]} too"
                owner[sample_id] = step
            yield from _annotation_problems(store, step, owner)
        for name in sorted(set(store.names(folder)) - {MANIFEST_FILE, *(file.path for file in manifest.files)}):
            yield f"{store.url(folder)}/{name}: is not in the manifest"


def _readers_choice(store: Store) -> tuple[set[str], dict[int, str]]:
    """Folders that readers pass over, and the one in which they read each step, of two packs that overlap, say; what is
    wrong with the manifests themselves is reported elsewhere."""
    try:
        catalog = Catalog(store)
    except DatasetError:
        return set(), {}
    return set(catalog.superseded), {step: catalog.folder(step) for step in catalog.steps}


def _file_problems(store: Store, place: Place, spec: RoutingSpec, manifest: Manifest) -> Iterator[str]:
    url, file = store.url(place.name), place.file
    try:
        if (size := store.size(place.name)) is None:
            yield f"{url}: is missing"
            return
        if size != file.bytes:
            yield f"{url}: has {size} bytes, its manifest says {file.bytes}"
        elif _sha256(store, place.name) != file.sha256:
            yield f"{url}: its sha256 is not the one in its manifest"
        with PartReader.open(store, place.name, spec) as part:
            if part.archived != manifest.archive:
                yield f"{url}: its layout is not the one in its manifest"
            yield from part.problems()
            ids = [
                sample_id for batch in part.batches(["sample_id"], None) for sample_id in batch.column(0).to_pylist()
            ]
            if ids != file.sample_ids:
                yield f"{url}: its sample_ids are not those in its manifest"
    except DatasetError as error:
        yield str(error)


def _step_problems(store: Store, folder: str, file: PartFile, manifest: Manifest, spec: RoutingSpec) -> Iterator[str]:
    """Rows whose step is not the one that the manifest gives them. What cannot be read was reported already."""
    extents = [(step, e) for step, _ in manifest.steps for e in manifest.extents(step) if e.file is file]
    expected = [step for step, extent in extents for _ in range(extent.start, extent.stop)]
    try:
        with PartReader.open(store, f"{folder}/{file.path}", spec) as part:
            found = [step for batch in part.batches(["step"], None) for step in batch.column(0).to_pylist()]
    except DatasetError:
        return
    if len(found) == len(expected) and found != expected:
        row = next(row for row, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        name = f"{store.url(folder)}/{file.path}"
        yield f"{name}: row {row} is of step {found[row]}, its manifest says {expected[row]}"


def _sha256(store: Store, name: str) -> str:
    digest = hashlib.sha256()
    with store.open(name) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _annotation_problems(store: Store, step: int, owner: dict[str, int]) -> Iterator[str]:
    try:
        files = annotation_files(store, step)
    except (DatasetError, OSError) as error:
        yield str(error)
        return
    for name in files:
        try:
            samples = read_annotation(store, name, step)
        except DatasetError as error:
            yield str(error)
            continue
        if unknown := [sample_id for sample_id in samples if owner.get(sample_id) != step]:
            yield f"{store.url(name)}: annotates {unknown[0]!r}, which is not in step {step}"


def _strays(store: Store) -> Iterator[str]:
    found = {
        name for name in store.names() if is_folder(name)
    }  # before the committed ones: another may appear any moment
    for name in sorted(found - store.committed().keys()):
        if isinstance(store, LocalStore):
            yield f"{store.url(name)}: has no {MANIFEST_FILE}; restore it, or remove the directory"
        elif litter := store.litter(LITTER_AGE_S, name):
            yield f"{store.url(name)}: holds {len(litter)} parts that were never committed; repair removes them"
    try:
        superseded = Catalog(store).superseded
    except DatasetError as error:
        superseded = []
        if "retention" in str(error):
            yield str(error)
    for name in superseded:
        yield f"{store.url(name)}: left by a compaction or a drop that was cut off; compact() or keep_from() removes it"
    if isinstance(store, LocalStore):
        yield from _left_staging(store.root)


def _left_staging(root: Path) -> Iterator[str]:
    try:
        dead, foreign = dead_staging(root), foreign_staging(root)
    except DatasetError as error:
        yield str(error)
        return
    for entry in dead:
        yield f"{entry}: left by a writer that died; storage.clean_staging({str(root)!r}) removes it"
    yield from foreign
