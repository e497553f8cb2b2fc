"""`moe-rollout plot` and the pictures: what is drawn, read back from the figures, against values known by hand."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from rollout import canvas
from rollout.__main__ import main
from rollout.drift_pictures import drift_pictures
from rollout.pictures import load_ratio, survey_pictures
from rollout.run_pictures import mismatch, read_comparison, smooth, timeline
from storage import RoutingSpec, Site, Trace, TraceWriter
from storage.drift import Drift
from storage.stats import load_entropy
from storage.survey import Survey
from tests.rollout.test_layering import MODULES, imports
from tests.storage.builders import ONE, make_pair
from tests.storage.test_drift import turned
from tests.storage.toy import TOY, long_trace, short_trace

WIDE = RoutingSpec.uniform(num_sites=48, num_experts=200, top_k=8)


def survey_of(spec: RoutingSpec, *steps: list[Trace]) -> Survey:
    survey = Survey(spec)
    for step, traces in enumerate(steps):
        survey.add_step(step, traces)
    return survey


def drawn(pictures: list[canvas.Picture], name: str) -> Figure:
    """The figure of this name, laid out."""
    with canvas.style():
        figure = next(picture for picture in pictures if picture.name == name).draw()
        figure.draw_without_rendering()
    return figure


def wide_traces(step: int, version: int, spec: RoutingSpec = WIDE) -> list[Trace]:
    """Four prompts with 40 random rows each."""
    rng = np.random.default_rng(step)
    tokens = {"prompt_ids": [1] * 20, "completion_ids": [2] * 21, "logprobs": np.zeros(21), "finish_reason": "stop"}
    ids = np.argsort(rng.random((4, 40, spec.num_sites, spec.sites[0].num_experts)), axis=-1)[..., : spec.top_k].astype(
        np.uint8
    )
    names = [f"run/{step}/{prompt}/0" for prompt in range(4)]
    return [
        Trace(name, step, routed_experts=rows, weight_version=version, **tokens)
        for name, rows in zip(names, ids, strict=True)
    ]


def labels_of(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def test_load_map_shows_multiples_of_the_balanced_load_and_black_where_never() -> None:
    unused = replace(short_trace(), routed_experts=np.array([[[2, 0], [1, 2]]], np.uint8))  # site 1 never chooses 3
    survey = survey_of(TOY, [unused])
    assert load_ratio(survey).tolist() == [[2, 0, 2, 0], [0, 2, 2, 0]]
    figure = drawn(survey_pictures(survey), "expert_load")
    (image,) = figure.axes[0].images
    colours = image.to_rgba(image.get_array())
    assert [[tuple(cell) == to_rgba("black") for cell in row] for row in colours] == [
        [False, True, False, True],
        [True, False, False, True],
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["never chosen (4 of 8)"]
    assert (figure.axes[0].get_xlabel(), labels_of(figure.axes[0].yaxis)) == ("expert id", ["0", "2"])
    assert figure.axes[1].get_ylabel() == "times the balanced load"


def test_experts_that_a_site_does_not_have_are_no_idle_ones() -> None:
    narrow = RoutingSpec((TOY.sites[0], TOY.sites[1]._replace(num_experts=3)))
    trace = replace(short_trace(), routed_experts=np.array([[[0, 1], [1, 2]]], np.uint8))
    ratio = load_ratio(survey_of(narrow, [trace]))
    assert ratio.tolist()[1][:3] == [0, 1.5, 1.5]
    assert np.isnan(ratio[1, 3])


def test_entropy_has_a_line_per_layer_and_their_mean() -> None:
    survey = survey_of(TOY, [long_trace()], [short_trace()])
    axes = drawn(survey_pictures(survey), "load_entropy").axes[0]
    first, second, mean = [np.array(line.get_ydata()) for line in axes.lines]
    assert first.tolist() == [load_entropy(np.array(counts)) for counts in ([1, 3, 1, 1], [1, 0, 1, 0])]
    assert second.tolist() == [load_entropy(np.array(counts)) for counts in ([2, 0, 2, 2], [0, 1, 0, 1])]
    assert mean.tolist() == pytest.approx(((first + second) / 2).tolist())
    assert axes.lines[0].get_xdata().tolist() == [0, 1]
    one = drawn(survey_pictures(survey_of(TOY, [long_trace()])), "load_entropy").axes[0]
    assert one.lines[0].get_ydata().tolist() == [first[0], second[0]]


def test_reuse_bars_and_chance_marks() -> None:
    axes = drawn(survey_pictures(survey_of(TOY, [long_trace()])), "reuse").axes[0]
    assert [bar.get_height() for bar in axes.patches] == [0.5, 0.5]
    marks = [segment[0, 1] for segment in axes.collections[0].get_segments()]
    assert marks == pytest.approx([(1 + 9 + 1 + 1) / 9 / 2, (4 + 0 + 4 + 4) / 9 / 2])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["the token before", "an unrelated token"]


def test_pictures_are_left_out_where_there_is_nothing_to_show() -> None:
    assert [p.name for p in survey_pictures(survey_of(TOY, [short_trace()]))] == ["expert_load", "load_entropy"]
    names = [p.name for p in survey_pictures(survey_of(ONE, make_pair()))]
    assert names == ["expert_load", "load_entropy", "reuse", "weight_versions"]


def test_versions_are_drawn_against_the_first() -> None:
    one_prompt = [replace(trace, group_id="one") for trace in make_pair()]
    pictures = survey_pictures(survey_of(ONE, one_prompt))
    axes = drawn(pictures, "weight_versions").axes[0]
    assert axes.lines[0].get_ydata().tolist() == [1]
    assert "version 0" in axes.get_ylabel()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["version 1"]
    assert "too few prompts" in pictures[-1].caption


def test_many_versions_are_thinned_out_and_stand_beside_chance() -> None:
    spec = RoutingSpec.uniform(num_sites=6, num_experts=16, top_k=2)
    survey = survey_of(spec, *(wide_traces(step, version=step, spec=spec) for step in range(20)))
    picture = next(p for p in survey_pictures(survey) if p.name == "weight_versions")
    assert "12 of 19 later versions" in picture.caption
    axes = drawn([picture], "weight_versions").axes[0]
    assert len(axes.lines) == 12 + 1
    assert axes.lines[-1].get_ydata() == pytest.approx(survey.moved_by_chance(0, 1))  # equal rows in all versions
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["from other prompts alone"]


def test_drift_pictures_show_agreement_and_the_change_of_shares() -> None:
    drift = Drift(TOY)
    drift.add(long_trace(), turned())
    pictures = drift_pictures(drift, "a", "b")
    common, same = drawn(pictures, "agreement").axes[0].lines
    assert common.get_ydata() == pytest.approx([5 / 6, 4 / 6])
    assert same.get_ydata() == pytest.approx([2 / 3, 2 / 3])
    (image,) = drawn(pictures, "moved_experts").axes[0].images
    sixth = 100 / 6  # one assignment of three rows with two experts
    assert image.get_array().ravel().tolist() == pytest.approx([0, 0, -sixth, sixth, -sixth, sixth, -sixth, sixth])
    equal = Drift(TOY)
    equal.add(long_trace(), long_trace())
    assert [picture.name for picture in drift_pictures(equal, "a", "b")] == ["agreement"]


def assert_apart(axis: Any, low: str, high: str) -> None:
    """The labels along an axis do not touch one another."""
    boxes = [text.get_window_extent() for text in axis.get_ticklabels() if text.get_text()]
    boxes.sort(key=lambda box: getattr(box, low))
    assert len(boxes) > 4
    assert all(getattr(a, high) < getattr(b, low) for a, b in itertools.pairwise(boxes))


def test_labels_do_not_overlap_at_200_experts_and_48_layers() -> None:
    survey = survey_of(WIDE, *(wide_traces(step, version=step) for step in range(3)))
    for name in ("reuse", "weight_versions", "expert_load"):
        axes = drawn(survey_pictures(survey), name).axes[0]
        assert_apart(axes.xaxis, "x0", "x1")
        assert_apart(axes.yaxis, "y0", "y1")
    pixel = canvas.DPI / axes.figure.dpi  # a figure that is not saved yet is laid out at another resolution
    assert axes.get_window_extent().width * pixel / 200 > 5
    assert axes.get_window_extent().height * pixel / 48 > 15


def test_names_of_two_routers_in_a_layer_do_not_overlap() -> None:
    kinds = ("self_attention.experts.router", "mlp.router")
    sites = (Site(f"model.layers.{n}.{kind}", n, 8, 2) for n in range(24) for kind in kinds)
    spec = RoutingSpec(tuple(sites))
    ids = np.argsort(np.random.default_rng(0).random((40, 48, 8)), axis=-1)[..., :2].astype(np.uint8)
    trace = replace(wide_traces(0, version=0)[0], routed_experts=ids)
    for name in ("reuse", "expert_load"):
        axes = drawn(survey_pictures(survey_of(spec, [trace])), name).axes[0]
        assert axes.get_window_extent().height > 0.5 * axes.figure.bbox.height  # not squeezed by its labels
        assert_apart(axes.xaxis, "x0", "x1")
    assert_apart(axes.yaxis, "y0", "y1")
    assert labels_of(axes.yaxis)[0] == "0 self_attention"


def comparison(**changes: Any) -> dict[str, Any]:
    def run(scale: float) -> dict[str, Any]:
        seen = [{"k3": scale * step, "clipped": 0.01 * step} for step in (1, 2, 3)]
        return {"native": seen, "replayed": [{**m, "k3": m["k3"] / 10} for m in seen], "reward": [0.1, 0.2, 0.3]}

    return {"false": [run(1.0), run(3.0)], "true": [run(1.0)], **changes}


def test_mismatch_takes_what_each_runs_own_loss_saw(tmp_path: Path) -> None:
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps(comparison()))
    runs = read_comparison(file)
    assert [run.k3 for run in runs["false"]] == [[1, 2, 3], [3, 6, 9]]
    assert [run.k3 for run in runs["true"]] == [[0.1, 0.2, 0.3]]
    figure = drawn([mismatch(file)], "mismatch")
    k3, clipped, _ = figure.axes
    assert [line.get_ydata().tolist() for line in k3.lines] == [[1, 2, 3], [3, 6, 9], [2, 4, 6], *[[0.1, 0.2, 0.3]] * 2]
    assert clipped.lines[0].get_ydata().tolist() == [0.01, 0.02, 0.03]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["replay off", "replay on"]
    assert [part.tolist() for part in smooth([1.0, 2.0, 6.0], 2)] == [[1, 2], [1.5, 4.0]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist; examples/compare_replay.py writes"),
        ("[1]", "is no comparison.json"),
        (json.dumps(comparison(true=[])), "has 2 runs without replay and 0 with it"),
        (json.dumps(comparison(true=[{"reward": []}])), "KeyError('replayed')"),
    ],
)
def test_another_file_is_no_comparison(content: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "comparison.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError) as error:
        read_comparison(file)
    assert words in str(error.value)


def test_timeline_draws_a_bar_per_step_and_the_hosts_work(tmp_path: Path) -> None:
    steps = [(0, 0.0, 0.010), (1, 0.009, 0.020), (2, 0.012, 0.030)]  # seconds; the host works from 10 to 12 ms
    rows = [{"step": n, "tokens": 4, "launched": a, "finalized": b} for n, a, b in steps]
    file = tmp_path / "overlap.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (axes,) = drawn([timeline([file])], "timeline").axes
    boxes = [path.get_extents() for bar in axes.collections for path in bar.get_paths()]
    assert [box.x0 for box in boxes] == pytest.approx([0, 9, 12, 10])
    assert [box.x1 for box in boxes] == pytest.approx([10, 20, 30, 12])
    assert [text.get_text() for text in axes.texts] == ["0", "1", "2"]
    assert axes.get_title(loc="left") == "overlap: 100% of the host's work is hidden"


def write(root: Path, spec: RoutingSpec, *steps: list[Trace]) -> str:
    with TraceWriter(root, spec) as writer:
        for step, traces in enumerate(steps):
            writer.write([replace(trace, step=step) for trace in traces], step=step)
            writer.commit(step)
    return str(root)


def test_plot_writes_the_pictures_and_prints_their_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roots = write(tmp_path / "a", TOY, [long_trace()]), write(tmp_path / "b", TOY, [turned()])
    out = tmp_path / "deep" / "pictures"
    assert main(["plot", roots[0], "--against", roots[1], "--out", str(out)]) == 0
    names = ["expert_load", "load_entropy", "reuse", "agreement", "moved_experts"]
    assert capsys.readouterr().out.splitlines() == [str(out / f"{name}.png") for name in names]
    for name in names:
        pixels = np.asarray(Image.open(out / f"{name}.png").convert("RGB"))
        assert pixels.shape[1] == canvas.WIDTH * canvas.DPI
        assert 0.005 < (pixels.min(-1) < 200).mean() < 0.9, name


def test_plot_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", write(tmp_path / "a", TOY, [long_trace()])]) == 1
    assert capsys.readouterr().err == "error: pictures need matplotlib: pip install 'moe-rollout[plot]'\n"


def test_matplotlib_is_imported_where_it_is_needed_only() -> None:
    users = [
        path for path in MODULES if "import matplotlib" in path.read_text() or "from matplotlib" in path.read_text()
    ]
    assert len(users) > 3
    assert not [path for path in users if "matplotlib" in {p for p, _ in imports(path, everywhere=False)}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--timeline", "missing.jsonl"], "timeline 'missing.jsonl' does not exist"),
        (["--mismatch", "missing.json"], "comparison 'missing.json' does not exist"),
        (["--against", "missing"], "missing"),
    ],
)
def test_a_users_error_is_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", write(tmp_path / "a", TOY, [long_trace()]), "--out", str(tmp_path / "out"), *arguments]) == 1
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()
