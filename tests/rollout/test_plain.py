"""Names that others chose reach tables, pages and pictures as they are, and a terminal obeys none of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from rollout.__main__ import main
from rollout.plain import plain
from storage import RoutingSpec
from tests.rollout.test_plot import write
from tests.rollout.test_report import Page
from tests.storage.toy import TOY, long_trace

SAMPLE = "run/0/[red]<img src=x onerror=alert(1)>[/b]/0"
NAMES = ("model.layers.0.[/b]<script>$x_{$", "model.layers.0.[red]$y^{$")


@pytest.fixture
def odd(tmp_path: Path) -> str:
    """A dataset whose directory, routers and sample have names that would be markup in Rich, HTML and matplotlib."""
    first, second, *others = TOY.sites
    sites = first._replace(name=NAMES[0], layer=0), second._replace(name=NAMES[1], layer=0), *others
    return write(tmp_path / "[red]a$_{$<b>", RoutingSpec(sites), [replace(long_trace(), sample_id=SAMPLE, seconds=1.0)])


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("run/0/[red]0[/red]\\[", "run/0/[red]0[/red]\\["),
        ("köln/日本", "köln/日本"),
        ("a\x1b[2J\x07\nb", r"a\x1b[2J\x07\nb"),
        ("x\u202ey\udcff", r"x\u202ey\udcff"),
    ],
)
def test_only_what_cannot_be_printed_is_changed(name: str, shown: str) -> None:
    assert plain(name).plain == shown


def test_inspect_and_compare_show_names_in_full(
    odd: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["inspect", odd]) == 0
    shown = capsys.readouterr().out
    assert f"dataset{odd}" in "".join(shown.split())
    assert SAMPLE in shown
    assert all(name.removeprefix("model.layers.") in shown for name in NAMES)
    assert main(["compare", odd, odd]) == 0
    shown = capsys.readouterr().out
    assert f"from{odd}to{odd}" in "".join(shown.split())  # the title is wrapped
    assert "0 [/b]<script>$x_{$" in shown


def test_the_page_and_its_pictures_take_them_as_text(odd: str, tmp_path: Path) -> None:
    assert main(["report", odd, "--against", odd, "--out", str(tmp_path / "report.html")]) == 0
    html = (tmp_path / "report.html").read_text()
    page = Page(html)
    assert page.open == []
    assert SAMPLE in page.cells
    assert "<script" not in html
    assert "onerror=alert(1)>" not in html


def test_rewards_that_are_not_finite_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "nan", TOY, [replace(long_trace(), reward=math.nan)])
    assert main(["inspect", root]) == 0
    assert "1 samples, none of them finite" in capsys.readouterr().out
    assert main(["report", root, "--out", str(tmp_path / "report.html")]) == 0
    assert "<b>not finite</b><span>mean reward</span>" in (tmp_path / "report.html").read_text()
