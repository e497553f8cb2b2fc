"""What processes were charged for: other load on the machine hardly changes it, where the clock says little."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
BUSY = 0.8
"""Of one core, from which a process counts as having no time to spare."""


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Stopwatch:
    """Seconds of the clock, and of a core for each named group of processes, since it was made.

    >>> watch = Stopwatch({"generator": [4711], "sink": [4712, 4713]})
    >>> watch.read()
    (2.0, {'generator': 1.9, 'sink': 0.8})
    """

    def __init__(self, groups: dict[str, list[int]]) -> None:
        self._groups = groups
        self._begun, self._charged = time.perf_counter(), self._sum()

    def read(self) -> tuple[float, dict[str, float]]:
        seconds = time.perf_counter() - self._begun
        return seconds, {name: charged - self._charged[name] for name, charged in self._sum().items()}

    def busy(self) -> dict[str, float]:
        """The share of a core that each process of a group had, on average."""
        seconds, charged = self.read()
        return {name: charged[name] / seconds / len(self._groups[name]) for name in charged}

    def _sum(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, group)) for name, group in self._groups.items()}


def bottleneck(busy: dict[str, float]) -> str:
    """Who has no time to spare.

    >>> bottleneck({"generator": 0.97, "sink": 0.4})
    'the generator: 97% of a core'
    >>> bottleneck({"generator": 0.5, "sink": 0.4})
    'no process: the busiest, the generator, has 50% of a core; they wait for the disk, for Ray, or for cores'
    """
    name = max(busy, key=busy.__getitem__)
    if busy[name] >= BUSY:
        return f"the {name}: {busy[name]:.0%} of a core"
    waits = "they wait for the disk, for Ray, or for cores"
    return f"no process: the busiest, the {name}, has {busy[name]:.0%} of a core; {waits}"
