"""The JSON texts of a dataset; storage/FORMAT.md is their specification.

traces/_dataset.json                         {"format_version": "1", "routing_spec": {"sites": [...]}}
traces/step-000000007/_manifest.json         {"format_version": "1", "step": 7, "samples": 12, ...}
traces/step-000000007/part-00000.parquet
traces/pack-000000000-000000006/_manifest.json    several steps in one folder, see storage/compact.py
traces/_staging/000000008-<host>-<unique>/   not committed yet, see storage/staging.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from storage.archive import ARCHIVE
from storage.errors import DamagedDataError, FormatVersionError, MissingDataError
from storage.promises import Promises
from storage.schema import FORMAT_VERSION, check_version
from storage.trace import RoutingSpec

if TYPE_CHECKING:
    from storage.store import Store

DATASET_FILE = "_dataset.json"
MANIFEST_FILE = "_manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{9,18})")
_PACK_FOLDER = re.compile(r"pack-\d{9,18}-\d{9,18}-[0-9a-f]{8}")
_PART = re.compile(r"part-\d{5,9}(-[0-9a-f]{32})?\.parquet")
_SHA256 = re.compile(r"[0-9a-f]{64}")


# What parsing hostile JSON can raise: OverflowError for Infinity, RecursionError for deep nesting.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class PartFile:
    """One Parquet file of a folder: its name, size, digest and the samples in it, in row order."""

    path: str
    bytes: int
    sha256: str
    rows: int
    sample_ids: list[str]

    def __post_init__(self) -> None:
        if not _PART.fullmatch(self.path):
            raise ValueError(f"path {self.path!r} is not a part file such as 'part-00000.parquet'")
        if not all(isinstance(sample_id, str) for sample_id in self.sample_ids):
            raise ValueError(f"{self.path} lists sample_ids that are no text")
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"{self.path} has sha256 {self.sha256!r}, need 64 hexadecimal digits")
        _count(self.bytes, f"bytes of {self.path}")
        if _count(self.rows, f"rows of {self.path}") != len(self.sample_ids):
            raise ValueError(f"{self.path} has {self.rows} rows and {len(self.sample_ids)} sample_ids")


class Extent(NamedTuple):
    """Rows `[start, stop)` of one part file."""

    file: PartFile
    start: int
    stop: int

    @property
    def sample_ids(self) -> list[str]:
        """The samples in these rows."""
        return self.file.sample_ids[self.start : self.stop]


@dataclass(frozen=True)
class Manifest:
    """What one folder holds: part files and the steps whose samples follow one another in them.

    >>> Manifest([PartFile("part-00000.parquet", 9120, "5c0f...", 3, ["a", "b", "c"])], [(0, 2), (1, 1)])
    """

    files: list[PartFile]
    steps: list[tuple[int, int]]  # (step, number of samples)
    archive: bool = False  # the layout of the files, see storage/archive.py

    @classmethod
    def of_step(cls, step: int, files: list[PartFile]) -> Manifest:
        """The manifest of a step folder."""
        return cls(files, [(step, sum(file.rows for file in files))])

    @property
    def step(self) -> int:
        """The step of a step folder."""
        ((step, _),) = self.steps
        return step

    @property
    def sample_ids(self) -> list[str]:
        """All samples, in the order of their rows."""
        return [sample_id for file in self.files for sample_id in file.sample_ids]

    def extents(self, step: int) -> Iterator[Extent]:
        """Where the samples of `step` lie, in the order they were written."""
        position = next(index for index, (number, _) in enumerate(self.steps) if number == step)
        first = sum(count for _, count in self.steps[:position])
        last, row = first + self.steps[position][1], 0
        for file in self.files:
            start, stop = max(first, row) - row, min(last, row + file.rows) - row
            if start < stop:
                yield Extent(file, start, stop)
            row += file.rows

    def to_json(self) -> str:
        """Inverse of `from_json`."""
        several: dict[str, Any] = {"steps": self.steps, "samples": sum(count for _, count in self.steps)}
        one = {"step": self.steps[0][0], "samples": self.steps[0][1]}
        head: dict[str, Any] = {"format_version": FORMAT_VERSION} | ({"layout": ARCHIVE} if self.archive else {})
        head |= one if len(self.steps) == 1 and not self.archive else several
        return json.dumps(head | {"files": [asdict(file) for file in self.files]}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse and check; raises ValueError, KeyError or TypeError on anything but a manifest."""
        raw: dict[str, Any] = json.loads(text)
        check_version(raw["format_version"], "the manifest")
        if (layout := raw.get("layout")) not in (None, ARCHIVE):
            raise FormatVersionError(
                f"the manifest has layout {layout!r}, this release of moe-rollout reads {ARCHIVE!r}"
            )
        files = [PartFile(**file) for file in raw["files"]]
        steps = raw["steps"] if "steps" in raw else [[raw["step"], raw["samples"]]]
        manifest = cls(
            files, [(_count(step, "step"), _count(count, "samples")) for step, count in steps], layout is not None
        )
        total = sum(file.rows for file in files)
        if not raw["samples"] == sum(count for _, count in manifest.steps) == total:
            raise ValueError(f"it counts {raw['samples']} samples and lists {total}")
        if len(dict(manifest.steps)) != len(manifest.steps) or len({file.path for file in files}) != len(files):
            raise ValueError("it lists a step or a file twice")
        return manifest


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value!r}, need an integer from 0 on")
    return value


def step_folder(step: int) -> str:
    """The name of a step's folder. No `=` in it: readers must not infer a partition column."""
    return f"step-{step:09d}"


def step_directory(root: Path, step: int) -> Path:
    """Where a committed step lies in a local dataset that was not compacted."""
    return root / step_folder(step)


def step_of_folder(name: str) -> int | None:
    """7 for "step-000000007", None for a name that is no step folder."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match and step_folder(int(match[1])) == name else None


def is_folder(name: str) -> bool:
    """Whether `name` is one a step or a pack has."""
    return step_of_folder(name) is not None or _PACK_FOLDER.fullmatch(name) is not None


def read_manifest(store: Store, folder: str) -> Manifest:
    """The manifest of a committed folder; DamagedDataError, naming the file, when it cannot be read."""
    name = f"{folder}/{MANIFEST_FILE}"
    try:
        manifest = Manifest.from_json(store.read(name))
        if (step := step_of_folder(folder)) is not None and manifest.step != step:
            raise ValueError(f"it is the manifest of step {manifest.step}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingDataError(f"{store.url(name)} is missing; restore it, or remove the directory") from error
    except UNREADABLE as error:
        raise DamagedDataError(f"{store.url(name)}: {type(error).__name__}: {error}") from error
    return manifest


def dataset_json(spec: RoutingSpec, promises: Promises | None = None) -> str:
    """The text of `_dataset.json`; of the promises only what is weaker than the defaults."""
    head = {"format_version": FORMAT_VERSION, "routing_spec": json.loads(spec.to_json())}
    return json.dumps(head | (promises or Promises()).fields(), indent=1)


def read_promises(store: Store) -> Promises:
    """What every engine that wrote the dataset promised about its routes.

    Raises:
        DamagedDataError: when `_dataset.json` cannot be read.
    """
    try:
        return Promises.read(json.loads(store.read(DATASET_FILE)))
    except UNREADABLE as error:
        raise DamagedDataError(f"{store.url(DATASET_FILE)}: {type(error).__name__}: {error}") from error


def read_spec(store: Store) -> RoutingSpec:
    """The spec of the dataset in `store`.

    Raises:
        FileNotFoundError: when there is no dataset.
        FormatVersionError: when another release wrote it.
        DamagedDataError: when `_dataset.json` cannot be read.
    """
    url = store.url(DATASET_FILE)
    try:
        raw = json.loads(store.read(DATASET_FILE))
        check_version(raw["format_version"], url)
        return RoutingSpec.from_json(json.dumps(raw["routing_spec"]))
    except FormatVersionError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"no trace dataset at {store.url('')}: {url} does not exist (a TraceWriter creates it)"
        ) from error
    except UNREADABLE as error:
        raise DamagedDataError(f"{url}: {type(error).__name__}: {error}") from error
