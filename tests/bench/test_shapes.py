"""The benchmarks of single shapes: what they predict, by hand, and that each says what it measured. None on time."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from rollout.floor import Attention, Floor
from tests.bench import bench_shapes
from tests.bench.bench_overlap import Run, gains, in_turn
from tests.bench.bench_shapes import COMMANDS, build_parser, main
from tests.bench.growth import compared, extra_ms


@pytest.mark.parametrize(("flops", "ms"), [(1e12, 6.0), (1e9, 30.0)])
def test_a_longer_context_adds_the_longer_of_reading_and_computing(flops: float, ms: float) -> None:
    """Three sequences, 20 tokens more: 60 tokens of 1,000 bytes at 10 MB/s, or of 500 kFLOP."""
    options = Namespace(batch=3, context=[5, 25])
    assert extra_ms(25, options, Floor(read=1e7, flops=flops), Attention(1000.0, 5e5)) == pytest.approx(ms)
    assert extra_ms(5, options, Floor(read=1e7, flops=flops), Attention(1000.0, 5e5)) == 0.0


def test_requests_that_wait_are_predicted_to_cost_nothing() -> None:
    rows = compared("waiting", [64, 512], [20.0, 25.0], [0.0, 0.0])
    assert [row["predicted ms"] for row in rows] == [20.0, 20.0]
    assert [row["measured / predicted"] for row in rows] == [1.0, 1.25]


def test_the_gain_of_overlap_is_held_against_the_ideal_one() -> None:
    """Off, steps of 30 ms wait 20 ms for the device and 10 ms for the host: at best 20 ms, a gain of 1.5."""
    off = Run(step=0.030, wait=0.020)
    found = gains([(Run(0.020, 0.0), off), (Run(0.024, 0.0), off), (Run(0.025, 0.0), off)])
    assert (found["on ms"], found["off ms"], found["device ms"]) == pytest.approx((24, 30, 20))
    assert (found["gain"], found["min"], found["max"]) == pytest.approx((1.25, 1.2, 1.5))
    assert found["share of ideal"] == pytest.approx(1.25 / 1.5)


def test_overlap_on_and_off_take_turns_in_being_first_and_the_first_round_does_not_count() -> None:
    asked: list[bool] = []

    def measure(overlap: bool) -> Run:
        asked.append(overlap)
        return Run(len(asked), float(overlap))

    rounds = in_turn(measure, 2)
    assert asked == [False, True, True, False, False, True]
    assert rounds == [(Run(3, 1.0), Run(4, 0.0)), (Run(6, 1.0), Run(5, 0.0))]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_defaults_and_prints_rows(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(options: Namespace, scratch: Path) -> list[dict[str, Any]]:
        """Measure nothing."""
        assert options == build_parser().parse_args([command, "--json"])
        assert scratch.is_dir()
        return [{"size": "small", "share": 0.5}]

    monkeypatch.setitem(bench_shapes.COMMANDS, command, work)
    monkeypatch.setattr(sys, "argv", ["bench_shapes", command, "--json"])
    main()
    assert json.loads(capsys.readouterr().out) == {command: [{"size": "small", "share": 0.5}]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("prefill --sizes small --tokens 64 --batch 4", {"prompts": ["1 x 64", "4 x 16"]}),
        ("decode --sizes small --new-tokens 4 --batch 4", {"batch": [4]}),
        ("host --sizes small --new-tokens 4 --batch 4", {"batch": [4]}),
        ("growth --batch 2 --new-tokens 4 --waiting 2,9 --context 4,32", {"count": [2, 9, 4, 32]}),
    ],
)
def test_it_measures_the_small_model(
    arguments: str, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_shapes", *arguments.split(), "--threads", "1", "--repeats", "1", "--json"])
    main()
    (rows,) = json.loads(capsys.readouterr().out).values()
    for name, values in wanted.items():
        assert [row[name] for row in rows] == values
    assert all(value > 0 for row in rows for name, value in row.items() if isinstance(value, float))
