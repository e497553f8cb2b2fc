"""The timeline of an engine's steps: intervals by hand, the file, and that overlap shows in a real engine's."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from rollout.__main__ import main
from rollout.client import RolloutClient
from rollout.engine_stats import StepEvent
from rollout.run_pictures import timeline
from rollout.sampling import SamplingParams
from rollout.timeline import (
    StepSpan,
    hidden_share,
    host_work,
    read_timeline,
    step_spans,
    typical_window,
    write_timeline,
)
from rollout.tiny_moe import MODEL_PATH

OVERLAPPED = [StepSpan(0, 8, 0.0, 1.0), StepSpan(1, 8, 0.9, 2.0), StepSpan(2, 8, 1.2, 3.0)]
SERIAL = [StepSpan(0, 8, 0.0, 1.0), StepSpan(1, 8, 1.3, 2.0), StepSpan(2, 8, 2.1, 3.0)]


def test_a_step_without_both_of_its_events_is_left_out() -> None:
    events = [
        StepEvent("finalize", 6, 9.9, 0),
        StepEvent("launch", 7, 10.0, 40),
        StepEvent("launch", 8, 10.5, 3),
        StepEvent("finalize", 7, 11.0, 0),
        StepEvent("launch", 9, 11.25, 2),
        StepEvent("finalize", 8, 12.0, 0),
    ]
    assert step_spans(events) == [StepSpan(7, 40, 0.0, 1.0), StepSpan(8, 3, 0.5, 2.0)]


def test_the_hosts_work_lies_between_results_and_the_next_launch() -> None:
    assert host_work(OVERLAPPED) == [(1.0, 1.2)]
    assert host_work(SERIAL) == [(1.0, 1.3), (2.0, 2.1)]


def test_hidden_is_the_work_beside_a_step_in_flight() -> None:
    assert hidden_share(OVERLAPPED) == pytest.approx(1)
    assert hidden_share(SERIAL) == 0
    half = [StepSpan(0, 8, 0.0, 1.0), StepSpan(1, 8, 0.5, 1.25), StepSpan(2, 8, 1.5, 2.0)]  # 1 to 1.25 of 1 to 1.5
    assert hidden_share(half) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="1 steps of which none was launched after"):
        hidden_share(OVERLAPPED[:1])


def test_a_typical_window_holds_no_pause() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 99.0, 100.0, 101.0, 102.0, 103.0]
    spans = [StepSpan(n, 1, time, time + 0.5) for n, time in enumerate(times)]
    window = typical_window(spans, 3)
    assert [b.launched - a.launched for a, b in pairwise(window)] == [1, 1]
    assert typical_window(spans, 20) == spans


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist; `moe-rollout sample --timeline FILE` writes one"),
        ("", "holds no step"),
        ('{"step": 1}\n', r"timeline.jsonl line 1: no step of a timeline: {\"step\": 1}"),
        ("{}x", "line 1: no step"),
        ('{"step": 1, "tokens": 2, "launched": 2.0, "finalized": 1.0}', "step 1 was not finalized after its launch"),
        ('{"step": 1, "tokens": 2, "launched": NaN, "finalized": NaN}', "step 1 was not finalized after its launch"),
        ("\udcff\udcfe\n", "timeline.jsonl line 1: no step"),
    ],
)
def test_another_file_is_no_timeline(content: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=words):
        read_timeline(file)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_starts_before_the_one_before_it_ends_with_overlap_only(overlap: bool, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with RolloutClient.local(MODEL_PATH, dtype="float32", disable_overlap_schedule=not overlap) as client:
        client.sample(["1+2=", "3+4="], sampling_params=params)
        count = write_timeline(client.backend.stats.events, tmp_path / "timeline.jsonl")
        assert count == client.backend.stats.forwards
    spans = read_timeline(tmp_path / "timeline.jsonl")
    assert len(spans) == count >= 12
    assert spans[0].launched == 0
    assert {b.launched < a.finalized for a, b in pairwise(spans[:10])} == {overlap}
    assert hidden_share(spans[:10]) == pytest.approx(1.0 if overlap else 0.0)


def test_sample_writes_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.txt").write_text("1+2=\n")
    file = tmp_path / "timeline.jsonl"
    arguments = ["sample", str(MODEL_PATH), "--prompts", str(tmp_path / "prompts.txt"), "--timeline", str(file)]
    assert main([*arguments, "--dtype", "float32"]) == 0
    assert json.loads(file.read_text().splitlines()[0])["tokens"] == 4
    assert main([*arguments, "--num-actors", "2"]) == 1
    assert "leave --num-actors out" in capsys.readouterr().err
    traces = tmp_path / "traces"
    assert main([*arguments[:-1], str(tmp_path / "missing" / "file"), "--traces", str(traces)]) == 1
    assert not traces.exists()  # refused before anything was sampled


def test_a_timeline_too_short_to_draw_is_named(tmp_path: Path) -> None:
    file = tmp_path / "short.jsonl"
    file.write_text('{"step": 0, "tokens": 2, "launched": 0.0, "finalized": 1.0}')
    with pytest.raises(ValueError, match=r"short.jsonl: 1 steps of which none was launched after"):
        timeline([file])
