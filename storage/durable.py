"""Files and names that survive power loss."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, data: str | bytes) -> None:
    """Create `path` with `data` and wait until it is on disk; FileExistsError when it exists."""
    with open(path, "xb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        os.fsync(file.fileno())


def fsync_directory(path: Path) -> None:
    """Wait until the names in `path` are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path) -> None:
    """Make `path` and what is missing above it, and wait until the names that are new are on disk."""
    new = [level for level in (path, *path.parents) if not level.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for level in new:
        fsync_directory(level.parent)
