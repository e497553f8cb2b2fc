"""The benchmark of groups runs, and says what it measured."""

from __future__ import annotations

import re
import sys

import pytest

from rollout.tiny_moe import MODEL_PATH
from tests.bench import bench_group


@pytest.mark.full
def test_the_benchmark_of_groups_prints_speeds_ratios_and_communication(monkeypatch, capsys) -> None:
    monkeypatch.setattr(bench_group, "make_small", lambda directory: MODEL_PATH)
    monkeypatch.setattr(bench_group, "PROMPT_LEN", 4)
    monkeypatch.setattr(bench_group, "prompts", lambda requests: [[3 + i, 5, 7, 9] for i in range(requests)])
    monkeypatch.setattr(sys, "argv", ["bench_group", "--repeats", "1", "--requests", "4", "--new-tokens", "4"])
    bench_group.main()
    text = capsys.readouterr().out
    assert "4 requests of 4 + 4 tokens" in " ".join(text.split())
    for layout in ("alltoall", "allgather"):
        (row,) = (line for line in text.splitlines() if line.count("│") > 2 and f"2 ranks, {layout}" in line)
        speed, ratio, *_, share = re.findall(r"[\d.]+", row.partition(layout)[2])
        assert int(speed) > 0
        assert float(ratio) > 0
        assert int(share) > 0
    assert re.search(r"Experts per rank: (\d+) MiB, \1 MiB\.", text)
