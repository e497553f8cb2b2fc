"""Drop old steps: one small file, replaced atomically, says which step is the first; deleting comes after."""

from __future__ import annotations

import json

from storage.errors import DamagedDataError
from storage.manifest import UNREADABLE
from storage.schema import FORMAT_VERSION, check_version
from storage.store import Store

RETENTION_FILE = "_retention.json"


def first_kept_step(store: Store) -> int:
    """Steps below this one were dropped, whether their files are gone yet or not. 0 when nothing was."""
    try:
        raw = json.loads(store.read(RETENTION_FILE))
        check_version(raw["format_version"], store.url(RETENTION_FILE))
        if type(raw["first_step"]) is not int or raw["first_step"] < 0:
            raise ValueError(f"first_step is {raw['first_step']!r}, need an integer from 0 on")
        return raw["first_step"]
    except FileNotFoundError:
        return 0
    except UNREADABLE as error:
        raise DamagedDataError(f"{store.url(RETENTION_FILE)}: {type(error).__name__}: {error}") from error


def keep_from(store: Store, step: int) -> None:
    """Drop every step below `step` for readers. It never goes back: a dropped step stays dropped.

    Raises:
        ValueError: when steps from `step` on are dropped already.
    """
    if step < (first := first_kept_step(store)):
        raise ValueError(f"steps before {first} of {store.url('')} are dropped already; they cannot come back")
    text = json.dumps({"format_version": FORMAT_VERSION, "first_step": step})
    store.replace(RETENTION_FILE, text.encode())
