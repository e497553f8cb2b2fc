"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path


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
