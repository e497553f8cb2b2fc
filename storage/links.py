"""Symbolic links below a dataset's root are refused: they would lead readers, and writers, out of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from storage.errors import DamagedDataError


def refuse_link(path: Path) -> None:
    """DamagedDataError when `path` itself is a symbolic link."""
    if path.is_symlink():
        raise DamagedDataError(link_problem(path))


def refuse_links(root: Path, name: str) -> None:
    """The same for `name` and every directory between it and `root`, which may be a link itself."""
    path = root
    for part in PurePosixPath(name).parts:
        path = path / part
        refuse_link(path)


def link_problem(path: Path | str) -> str:
    """How messages name a link, and what to do about it."""
    return f"{path} is a symbolic link, which a dataset must not hold; {_remedy(path)}"


def _remedy(path: Path | str) -> str:
    target = ""
    with suppress(OSError):  # it has just been removed
        target = os.readlink(path)
    if "blobs" in PurePosixPath(target).parts:  # of huggingface_hub's cache, whose files are not for users to change
        return (
            "it leads into the Hugging Face cache: download the dataset with "
            'huggingface_hub.snapshot_download(..., repo_type="dataset", local_dir="traces"), which makes files'
        )
    return "put what it points to in its place"


def links_below(root: Path) -> Iterator[str]:
    """Every symbolic link below `root`, which is walked without following any; in order of their paths. What cannot be
    looked into is passed over: whoever reads what the dataset has there is told."""
    entries: list[os.DirEntry[str]] = []
    with suppress(OSError):  # it has just been published or removed; or nobody may look, as in lost+found, or can
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_symlink():
            yield entry.path
        elif entry.is_dir(follow_symlinks=False):
            yield from links_below(Path(entry.path))
