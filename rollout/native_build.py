"""kernels.cpp, compiled by the machine's C++ compiler when the first engine of a process starts: under a second."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILE = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-std=c++17", "-fPIC", "-fopenmp", "-c")
COMPILE_TIMEOUT_S = 120


class NativeKernelsError(RuntimeError):
    """There is no working C++ compiler, or what it made cannot be loaded."""


def load_library() -> ctypes.CDLL:
    """Compiled once per process, in a temporary directory that is removed again. `CXX` names another compiler.

    Raises:
        NativeKernelsError: what the compiler or the loader said; the next call tries again.
    """
    with _one_at_a_time():
        return _loaded()


@contextlib.contextmanager
def loading_beside(setting: bool | Literal["auto"] = "auto", device_type: str = "cpu") -> Iterator[None]:
    """Do it on a thread meanwhile, for an engine that will need it by `setting`, its EngineOptions.native_kernels:
    whoever then calls `load_library` waits for it, and hears of what fails."""
    if setting is False or device_type != "cpu":
        yield
        return
    with ThreadPoolExecutor(1, "moe-rollout-compile") as beside:
        beside.submit(load_library)
        yield


@functools.cache
def _one_at_a_time() -> threading.Lock:
    return threading.Lock()


@functools.cache
def _loaded() -> ctypes.CDLL:
    compiler = (os.environ.get("CXX") or "c++").split()
    try:
        with tempfile.TemporaryDirectory(prefix="moe-rollout-", ignore_cleanup_errors=True) as directory:
            code, library = f"{directory}/kernels.o", f"{directory}/kernels.so"
            _run([*compiler, *COMPILE, str(SOURCE), "-o", code])
            _run([*compiler, "-shared", code, "-o", library])  # no OpenMP library of its own
            import torch  # noqa: F401 (its OpenMP library, and its threads; perhaps another thread imports it right now)

            return ctypes.CDLL(library)
    except OSError as error:
        raise NativeKernelsError(f"the kernels cannot be made or loaded: {error}; see TMPDIR") from error


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise NativeKernelsError(f"`{' '.join(command)}` failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeKernelsError(f"no C++ compiler: {error}; install one, or name it in CXX") from error
