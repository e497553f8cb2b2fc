"""Memory of this process, and what is left for it, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def resident_bytes() -> int | None:
    """Bytes of this process in memory now, without what it has freed; None where there is no `/proc`."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)  # glibc keeps freed memory for later
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that they ever were."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def available_bytes() -> int:
    """Memory that this process may still take, of the machine and of its control group; 0 where nothing says so."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 0
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return min(int(fields["MemAvailable"].split()[0]) * 1024, *(left for left in map(_left, CGROUP_FILES)))


def _left(files: tuple[str, str]) -> int:
    limit, used = map(Path, files)
    if not (limit.exists() and used.exists()) or (most := limit.read_text().strip()) == "max":
        return sys.maxsize
    return int(most) - int(used.read_text())
