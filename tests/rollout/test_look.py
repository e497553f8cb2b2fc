"""`moe-rollout compare`: what it prints about two small datasets written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollout.__main__ import main
from rollout.look import site_labels
from storage import Site, Trace, TraceWriter
from tests.storage.builders import ONE, make_pair
from tests.storage.test_drift import turned
from tests.storage.toy import TOY, long_trace


def written(root: Path, spec, traces: list[Trace]) -> str:
    with TraceWriter(root, spec) as writer:
        writer.write(traces, step=0)
        writer.commit(0)
    return str(root)


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    return [written(tmp_path / "a", TOY, [long_trace()]), written(tmp_path / "b", TOY, [turned()])]


def test_compare_as_json(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *pair, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["rows"], found["left"], found["right"]) == (1, 3, *pair)
    first = found["sites"][0]
    assert (first["site"], first["layer"]) == ("layers.0.gate", 0)
    assert (first["overlap"], first["load_moved"]) == pytest.approx((5 / 6, 1 / 6))
    assert first["gained"] == [{"expert": 3, "moved": 1, "share": pytest.approx(1 / 6)}]
    assert first["lost"] == [{"expert": 2, "moved": -1, "share": pytest.approx(-1 / 6)}]


def test_compare_as_a_table_fits_a_terminal(pair: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *pair, "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("│     2"))
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "2", "66.67%", "66.67%", "33.33%", "1\u00a0+16.67", "0\u00a0-16.67",
    ]  # fmt: skip


def test_compare_of_two_weight_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = written(tmp_path / "a", ONE, make_pair())
    assert main(["compare", root, "--versions", "0", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["other_rows"]) == (3, 1)
    (site,) = found["sites"]
    assert site["load_moved"] == 1
    assert site["moved_by_chance"] == pytest.approx((8 / 9) ** 0.5)  # halves of 1 and 2 rows: s = 1 / (1 + 1/2)
    assert site["gained"] == [{"expert": 7, "share": 1.0}]
    assert sorted(expert["expert"] for expert in site["lost"]) == [5, 8, 9]
    assert main(["compare", root, "--versions", "0", "1"]) == 0
    assert "3 and 1 rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "compare needs a second dataset or --versions V W"),
        (["--versions", "0", "7"], "weight version 7 has no recorded rows in"),
        (["missing"], "missing"),
    ],
)
def test_a_users_error_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", written(tmp_path / "a", ONE, make_pair()), *arguments]) == 1
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_no_drift_is_no_mover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = replace(long_trace(), routed_experts=np.flip(long_trace().routed_experts, axis=-1).copy())
    roots = [written(tmp_path / "a", TOY, [long_trace()]), written(tmp_path / "b", TOY, [same])]
    assert main(["compare", *roots, "--json"]) == 0
    sites = json.loads(capsys.readouterr().out)["sites"]
    assert [(s["overlap"], s["load_moved"], s["gained"], s["lost"]) for s in sites] == [(1, 0, [], [])] * 2


def test_sites_that_share_a_layer_are_told_apart() -> None:
    sites = [Site("h.0.attention.router", 0, 4, 2), Site("h.0.mlp.router", 0, 4, 2), Site("h.1.gate", 1, 4, 2)]
    assert site_labels(sites) == ["0 attention", "0 mlp", "1"]
    alike = [Site("h.3.a.x", 3, 4, 2), Site("h.3.a.y", 3, 4, 2), Site("h.3.b.x", 3, 4, 2)]
    assert site_labels(alike) == ["3 h.3.a.x", "3 h.3.a.y", "3 h.3.b.x"]
