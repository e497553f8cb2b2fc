"""storage is the light contract package."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import storage


def test_import_loads_neither_torch_nor_ray() -> None:
    code = "import sys, storage; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_every_name_loads_lazily_and_is_listed() -> None:
    assert sorted(storage.__all__) == sorted(storage._HOME)
    for name, module in storage._HOME.items():
        assert getattr(storage, name) is getattr(importlib.import_module(f"storage.{module}"), name)
    assert set(storage.__all__) < set(dir(storage))
    with pytest.raises(AttributeError, match="module 'storage' has no attribute 'TraceReader'"):
        storage.TraceReader  # noqa: B018
