"""The Python in docs/ runs as it is written: the blocks of a page one after the other, in an empty directory."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from rollout.__main__ import build_parser

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def pages_with_blocks() -> list[Any]:
    """The two longest ones are of the `full` tier."""
    slow = ("looking", "operations")
    pages = [page for page in PAGES if blocks(page)]
    return [pytest.param(p, id=p.stem, marks=[pytest.mark.full] * (p.stem in slow)) for p in pages]


@pytest.mark.parametrize("page", pages_with_blocks())
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, str(page), "exec"), names)


def test_files_that_the_docs_name_exist() -> None:
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for name in re.findall(r"`((?:storage|rollout|actors|tests|examples|docs)/[\w./-]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def command_lines(page: Path) -> list[str]:
    """The lines of a page's shell blocks that call `moe-rollout`, comments and all."""
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL))
    return [line for line in shell.splitlines() if line.startswith("moe-rollout ")]


@pytest.mark.parametrize("line", [line for page in (*PAGES, ROOT / "README.md") for line in command_lines(page)])
def test_the_command_line_takes_what_the_docs_type(line: str) -> None:
    build_parser().parse_args(shlex.split(line, comments=True)[1:])
