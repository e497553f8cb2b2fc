"""The JSON files of a dataset: `_dataset.json` fixes the spec, each `_manifest.json` says what a step holds.

    traces/_dataset.json                         {"format_version": "1", "routing_spec": {"sites": [...]}}
    traces/step-000000007/_manifest.json         {"format_version": "1", "step": 7, "samples": 12, ...}
    traces/step-000000007/part-00000.parquet
    traces/_staging/000000008-<host>-<unique>/   not committed yet, see storage/staging.py

A step is committed when its directory exists; the directory appears by one rename and never changes again.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.errors import DamagedDataError, FormatVersionError
from storage.schema import FORMAT_VERSION, check_version
from storage.trace import RoutingSpec

DATASET_FILE = "_dataset.json"
MANIFEST_FILE = "_manifest.json"
_STEP_DIRECTORY = re.compile(r"step-(\d{9,})")
_PART = re.compile(r"part-\d{5,}\.parquet")


# What parsing hostile JSON can raise: OverflowError for Infinity, RecursionError for deep nesting.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class PartFile:
    """One Parquet file of a step: its name, size, digest and the samples in it, in row order."""

    path: str
    bytes: int
    sha256: str
    rows: int
    sample_ids: list[str]

    def __post_init__(self) -> None:
        if not all(isinstance(sample_id, str) for sample_id in self.sample_ids):
            raise ValueError(f"{self.path} lists sample_ids that are no text")
        if not _PART.fullmatch(self.path):
            raise ValueError(f"path {self.path!r} is not a part file such as 'part-00000.parquet'")
        if self.rows != len(self.sample_ids):
            raise ValueError(f"{self.path} has {self.rows} rows and {len(self.sample_ids)} sample_ids")


@dataclass(frozen=True)
class Manifest:
    """What one committed step holds."""

    step: int
    files: list[PartFile]

    @property
    def sample_ids(self) -> list[str]:
        """All samples of the step, in the order they were written."""
        return [sample_id for file in self.files for sample_id in file.sample_ids]

    def to_json(self) -> str:
        """Inverse of `from_json`."""
        files = [asdict(file) for file in self.files]
        head = {"format_version": FORMAT_VERSION, "step": self.step, "samples": len(self.sample_ids)}
        return json.dumps(head | {"files": files}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse and check; raises ValueError, KeyError or TypeError on anything but a manifest."""
        raw: dict[str, Any] = json.loads(text)
        check_version(raw["format_version"], "the manifest")
        manifest = cls(int(raw["step"]), [PartFile(**file) for file in raw["files"]])
        if raw["samples"] != len(manifest.sample_ids):
            raise ValueError(f"it counts {raw['samples']} samples and lists {len(manifest.sample_ids)}")
        return manifest


def step_directory(root: Path, step: int) -> Path:
    """Where a committed step lies. No `=` in the name: readers must not infer a partition column."""
    return root / f"step-{step:09d}"


def committed_steps(root: Path) -> list[int]:
    """Steps that have a manifest, ascending."""
    found = ((_STEP_DIRECTORY.fullmatch(entry.name), entry) for entry in root.iterdir())
    return sorted({int(match[1]) for match, entry in found if match and (entry / MANIFEST_FILE).exists()})


def read_manifest(root: Path, step: int) -> Manifest:
    """The manifest of a committed step; DamagedDataError, naming the file, when it cannot be read."""
    path = step_directory(root, step) / MANIFEST_FILE
    try:
        manifest = Manifest.from_json(path.read_text("utf-8"))
        if manifest.step != step:
            raise ValueError(f"it is the manifest of step {manifest.step}")
    except _UNREADABLE as error:
        raise DamagedDataError(f"{path}: {type(error).__name__}: {error}") from error
    return manifest


def dataset_json(spec: RoutingSpec) -> str:
    """The text of `_dataset.json`."""
    return json.dumps({"format_version": FORMAT_VERSION, "routing_spec": json.loads(spec.to_json())}, indent=1)


def read_spec(root: Path) -> RoutingSpec:
    """The spec of the dataset at `root`.

    Raises:
        FileNotFoundError: when there is no dataset.
        FormatVersionError: when another release wrote it.
        DamagedDataError: when `_dataset.json` cannot be read.
    """
    path = root / DATASET_FILE
    if not path.exists():
        raise FileNotFoundError(f"no trace dataset at {root}: {path} does not exist (a TraceWriter creates it)")
    try:
        raw = json.loads(path.read_text("utf-8"))
        check_version(raw["format_version"], str(path))
        return RoutingSpec.from_json(json.dumps(raw["routing_spec"]))
    except FormatVersionError:
        raise
    except _UNREADABLE as error:
        raise DamagedDataError(f"{path}: {type(error).__name__}: {error}") from error


def write_durably(path: Path, text: str) -> None:
    """Create `path` with `text` and wait until it is on disk; FileExistsError when it exists."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Wait until the names in `path` are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
