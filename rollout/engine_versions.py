"""Version texts of engines: of their release, and of the weights they serve."""

from __future__ import annotations

from typing import Any

CONDEMNED = "broken by a failed update"
"""The weight version of an engine whose update failed half-way, until it is started again."""


def check_version(engine: str, found: str, least: tuple[int, int]) -> None:
    """Refuse an engine older than `least`; ValueError names both."""
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if len(numbers) == 2 and numbers < least:
        raise ValueError(
            f"{engine} {found} is too old for recorded routes; start version {least[0]}.{least[1]} or newer"
        )


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
