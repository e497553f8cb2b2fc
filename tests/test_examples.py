"""Every example runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from storage import TraceDataset

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
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
