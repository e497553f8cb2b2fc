"""Check a dataset against its manifests, checksums and the route contract. Repairs nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from storage.errors import DatasetError
from storage.manifest import (
    MANIFEST_FILE,
    PartFile,
    committed_steps,
    read_manifest,
    read_spec,
    step_directory,
)
from storage.part import PartReader
from storage.staging import dead_staging
from storage.trace import RoutingSpec


def verify_dataset(root: str | os.PathLike[str]) -> list[str]:
    """Every problem of the dataset at `root`, one text each, naming the file and where possible the sample.

    Looks at size and sha256 of each file, page checksums, each sample's crc32, row rule and expert ids,
    the spec, manifests against files, sample_ids that appear twice, and what dead writers left. Damaged
    data never raises.

    >>> verify_dataset("traces/")
    ['traces/step-000000000/part-00000.parquet: has 9120 bytes, its manifest says 9121']

    Raises:
        FileNotFoundError: when there is no dataset.
    """
    root = Path(root)
    try:
        spec = read_spec(root)
    except DatasetError as error:
        return [str(error)]
    return [*_step_problems(root, spec), *_strays(root)]


def _step_problems(root: Path, spec: RoutingSpec) -> Iterator[str]:
    owner: dict[str, int] = {}
    for step in committed_steps(root):
        try:
            manifest = read_manifest(root, step)
        except DatasetError as error:
            yield str(error)
            continue
        for file in manifest.files:
            yield from _file_problems(step_directory(root, step) / file.path, file, spec)
        for sample_id in manifest.sample_ids:
            if sample_id in owner:
                yield f"{step_directory(root, step)}: sample {sample_id!r} is in step {owner[sample_id]} too"
            owner[sample_id] = step
        known = {MANIFEST_FILE, *(file.path for file in manifest.files)}
        for name in sorted(set(os.listdir(step_directory(root, step))) - known):
            yield f"{step_directory(root, step) / name}: is not in the manifest"


def _file_problems(path: Path, file: PartFile, spec: RoutingSpec) -> Iterator[str]:
    if not path.is_file():
        yield f"{path}: is missing"
        return
    size = path.stat().st_size
    if size != file.bytes:
        yield f"{path}: has {size} bytes, its manifest says {file.bytes}"
    elif _sha256(path) != file.sha256:
        yield f"{path}: its sha256 is not the one in its manifest"
    try:
        with PartReader(path, spec) as part:
            yield from part.problems()
            if part.table(["sample_id"]).column(0).to_pylist() != file.sample_ids:
                yield f"{path}: its sample_ids are not those in its manifest"
    except DatasetError as error:
        yield str(error)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _strays(root: Path) -> Iterator[str]:
    found = set(root.glob("step-*"))  # before the committed ones: another step may appear any moment
    for directory in sorted(found - {step_directory(root, step) for step in committed_steps(root)}):
        yield f"{directory}: has no {MANIFEST_FILE}; restore it, or remove the directory"
    for entry in dead_staging(root):
        yield f"{entry}: left by a writer that died; storage.clean_staging({str(root)!r}) removes it"
