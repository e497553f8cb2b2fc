"""Version texts of engines: of their release, and of the weights they serve."""

from __future__ import annotations

import re
from typing import Any

CONDEMNED = "broken by a failed update"
"""The weight version of an engine whose update failed half-way, until it is started again."""


def check_version(engine: str, found: str, least: tuple[int, ...]) -> None:
    """Refuse an engine older than `least`; ValueError names both. A text that begins with no number is let through.

    >>> check_version("SGLang", "0.5.9.post1", (0, 5, 23))
    Traceback (most recent call last):
    ValueError: SGLang 0.5.9.post1 is too old for recorded routes; start version 0.5.23 or newer
    """
    numbers = re.match(r"\d+(\.\d+)*", found)
    if numbers is not None and tuple(map(int, numbers[0].split("."))) < least:
        need = ".".join(map(str, least))
        raise ValueError(f"{engine} {found} is too old for recorded routes; start version {need} or newer")


def version_number(text: Any) -> int:
    """Our number of an engine's weight version; both engines start with "default", which is 0.

    >>> version_number("default"), version_number("12")
    (0, 12)
    """
    if text == "default":
        return 0
    if text == CONDEMNED:
        raise ValueError(f"its weights were {CONDEMNED}")
    if not str(text).isdecimal():
        raise ValueError(f"weight version {text!r} is no number; set one with /update_weight_version")
    return int(text)
