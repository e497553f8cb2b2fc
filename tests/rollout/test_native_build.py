"""Compiling the kernels: machines without a compiler, what is left behind, what is loaded."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rollout import native_build
from rollout.native import choose_native
from rollout.native_build import NativeKernelsError, load_library, loading_beside

CPU = torch.device("cpu")


def forget() -> None:
    native_build._loaded.cache_clear()


def test_without_a_compiler_auto_says_so_and_does_without(monkeypatch, caplog, tmp_path) -> None:
    forget()
    monkeypatch.setenv("CXX", "no-such-compiler --flag")
    with caplog.at_level(logging.WARNING, logger="rollout.native"):
        assert choose_native("auto", CPU, 1) is None
    (line,) = caplog.messages
    assert line.startswith("no native kernels, and steps are slower: no C++ compiler: ")
    assert "install one, or name it in CXX" in line
    for setting, alike, asked in ((True, "", "native_kernels=True: "), ("auto", "dp_size", "dp_size, for which all ")):
        with pytest.raises(
            ValueError, match=rf"^{asked}.*no C\+\+ compiler.*Or use native_kernels=False in all of them"
        ):
            choose_native(setting, CPU, 1, alike)
    assert choose_native(False, CPU, 1, "dp_size") is None
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(native_build.tempfile, "tempdir", "/no/such/directory")
    with pytest.raises(NativeKernelsError, match=r"cannot be made or loaded: .*see TMPDIR"):
        load_library()
    monkeypatch.setattr(native_build.tempfile, "tempdir", None)
    broken = tmp_path / "compiler"
    broken.write_text("#!/bin/sh\nprintf '\\351 is not UTF-8' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeKernelsError, match=r"failed: . is not UTF-8"):
        load_library()
    monkeypatch.setattr(native_build, "SOURCE", Path(__file__))
    monkeypatch.delenv("CXX")
    with pytest.raises(NativeKernelsError, match="failed: "):
        load_library()
    monkeypatch.undo()
    forget()
    assert choose_native(True, CPU, 3).num_threads == 3


def test_on_another_device_there_are_none() -> None:
    device = torch.device("cuda")
    assert choose_native("auto", device, 1) is None
    assert choose_native(False, device, 1) is None
    with pytest.raises(ValueError, match="native_kernels=True is not available on device 'cuda'"):
        choose_native(True, device, 1)


def test_they_leave_nothing_behind_and_share_torchs_openmp(tmp_path: Path) -> None:
    code = (
        "import re, torch; from rollout.native_build import load_library; "
        "libraries = lambda: set(re.findall(r'\\S*(?:gomp|omp5|libomp)\\S*', open('/proc/self/maps').read())); "
        "before = libraries(); load_library(); assert libraries() == before, libraries(); print('loaded')"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "loaded", run.stderr
    assert not list(tmp_path.iterdir())


def test_threads_that_need_it_at_once_compile_once_and_a_failure_is_tried_again(monkeypatch, tmp_path) -> None:
    forget()
    monkeypatch.setattr(native_build.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with loading_beside(), pytest.raises(NativeKernelsError, match="no-such-compiler"):
        load_library()
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("CXX")
    runs: list[list[str]] = []
    run = native_build._run
    monkeypatch.setattr(native_build, "_run", lambda command: (runs.append(command), run(command)))
    with ThreadPoolExecutor(4) as pool, loading_beside():
        libraries = [future.result() for future in [pool.submit(load_library) for _ in range(4)]]
    assert (len(set(map(id, libraries))), len(runs)) == (1, 2)  # to compile and to link
    assert not list(tmp_path.iterdir())
