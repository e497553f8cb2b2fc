"""Every example runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from rollout.run_pictures import read_comparison
from rollout.tiny_moe import MODEL_PATH, exact_match, problems
from storage import TraceDataset

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_policy_step_moves_the_policy_and_its_rows_carry_version_1(tmp_path: Path) -> None:
    after = load("policy_step").main(str(tmp_path / "traces"), num_prompts=8)
    dataset = TraceDataset(tmp_path / "traces")
    assert dataset.verify() == []
    first, second = list(dataset.iter(step=0)), list(dataset.iter(step=1))
    assert {tuple(trace.weight_versions) for trace in first} == {((0, 0, t.num_rows),) for t in first}
    assert {tuple(trace.weight_versions) for trace in second} == {((1, 0, t.num_rows),) for t in second}
    assert len(after) == len(second) == 32
    shared = {trace.sample_id.split("/", 2)[2]: trace for trace in first}
    moved = [t for t in second if t.raw_logprobs[0] != shared[t.sample_id.split("/", 2)[2]].raw_logprobs[0]]
    assert len(moved) > 0.9 * len(second)


@pytest.mark.full
def test_grpo_runs_its_steps_and_keeps_the_traces_of_each_version(tmp_path: Path) -> None:
    grpo = load("grpo")
    recipe = grpo.parse(["--steps", "3", "--prompts", "8", "--evaluate", "20", "--traces", str(tmp_path)])
    history = grpo.run(recipe, progress=False)
    assert len(history.reward) == len(history.native) == 3
    assert [step for step, _ in history.greedy] == [0, 3]
    dataset = TraceDataset(tmp_path)
    assert dataset.verify() == []
    assert [{t.weight_version for t in dataset.iter(step=step)} for step in dataset.steps] == [{0}, {1}, {2}]
    assert "3 steps" in grpo.summary(recipe, history)


def test_advantages_of_a_group_by_hand() -> None:
    """Rewards 1 0 0 1: mean 0.5, deviation 0.5. A group that agrees has none."""
    traces = [type("T", (), {"reward": r}) for r in (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    advantages = load("grpo").group_advantages(traces, 4)
    assert advantages.tolist() == pytest.approx([0.9998, -0.9998, -0.9998, 0.9998, 0, 0, 0, 0], abs=1e-6)


@pytest.mark.full
def test_the_comparison_writes_a_table_and_a_picture_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = ["compare_replay.py", "--out", str(tmp_path), "--seeds", "0", "--steps", "2", "--prompts", "4"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--evaluate", "10"])
    compare = load("compare_replay")
    compare.main()
    assert {file.name for file in tmp_path.iterdir()} == {
        *("seed0-native.json", "seed0-replay.json", "comparison.json", "comparison.md", "comparison.png")
    }
    assert "| steps | 2 | 2 |" in (tmp_path / "comparison.md").read_text()
    (replayed,) = read_comparison(tmp_path / "comparison.json")["true"]  # what `moe-rollout plot --mismatch` draws
    assert replayed.k3 == [m["k3"] for m in compare.load(tmp_path)[True][0]["replayed"]]
    written = (tmp_path / "seed0-native.json").stat().st_mtime_ns
    compare.main()
    assert (tmp_path / "seed0-native.json").stat().st_mtime_ns == written
    assert "replay off" in capsys.readouterr().out


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One step of the built-in model with rewards."""
    directory = str(tmp_path_factory.mktemp("traces"))
    sums = problems(8, seed=0)
    params = SamplingParams(max_tokens=5, seed=0)
    with RolloutClient.local(MODEL_PATH, traces=directory, reward_fn=lambda t: exact_match(t.text, "55")) as client:
        client.sample([problem.prompt for problem in sums], num_samples=2, sampling_params=params)
    return directory


def test_a_training_step_needs_only_the_dataset(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    loss = load("offline_replay").main(traces)
    assert loss >= 0
    assert "16 traces of step 0" in capsys.readouterr().out


def test_three_readers_agree_with_the_traces(traces: str) -> None:
    pytest.importorskip("datasets")
    found = list(TraceDataset(traces).iter())
    expected = (np.mean([t.reward for t in found]), np.mean([len(t.completion_ids) for t in found]))
    for name, means in load("read_traces").main(traces).items():
        assert means == pytest.approx(expected), name
