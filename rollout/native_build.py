"""kernels.cpp, compiled by the machine's C++ compiler when the first engine of a process starts: under a second."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
COMPILE = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-std=c++17", "-fPIC", "-fopenmp", "-c")
COMPILE_TIMEOUT_S = 120
_NOT_LOADED = "the kernels cannot be made or loaded: {}; see TMPDIR"


class NativeKernelsError(RuntimeError):
    """There is no working C++ compiler, or what it made cannot be loaded."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Compiled once per process, in a temporary directory that is removed again. `CXX` names another compiler.

    Raises:
        NativeKernelsError: what the compiler or the loader said.
    """
    directory = compilation().result()
    try:
        return ctypes.CDLL(_library(directory))
    except OSError as error:
        raise NativeKernelsError(_NOT_LOADED.format(error)) from error
    finally:
        directory.cleanup()


@functools.cache
def compilation() -> Future[tempfile.TemporaryDirectory[str]]:
    """Started by the first who asks, on a thread: a process may import torch in the meantime."""
    executor = ThreadPoolExecutor(1, "moe-rollout-compile")
    future = executor.submit(_compile)
    executor.shutdown(wait=False)
    return future


def _compile() -> tempfile.TemporaryDirectory[str]:
    compiler = (os.environ.get("CXX") or "c++").split()
    try:
        directory = tempfile.TemporaryDirectory(prefix="moe-rollout-", ignore_cleanup_errors=True)
    except OSError as error:
        raise NativeKernelsError(_NOT_LOADED.format(error)) from error
    code = f"{directory.name}/kernels.o"
    _run([*compiler, *COMPILE, str(SOURCE), "-o", code])
    _run([*compiler, "-shared", code, "-o", _library(directory)])  # no OpenMP library of its own: torch's threads
    return directory


def _library(directory: tempfile.TemporaryDirectory[str]) -> str:
    return f"{directory.name}/kernels.so"


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise NativeKernelsError(f"`{' '.join(command)}` failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeKernelsError(f"no C++ compiler: {error}; install one, or name it in CXX") from error
