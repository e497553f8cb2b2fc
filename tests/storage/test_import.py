"""storage is the light contract package."""

from __future__ import annotations

import subprocess
import sys


def test_import_loads_neither_torch_nor_ray() -> None:
    code = "import sys, storage; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
