"""`moe-rollout export` on a dataset that the built-in model sampled."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from rollout.__main__ import main
from rollout.tiny_moe import MODEL_PATH
from storage import TraceDataset
from storage.convert import FORMATS, from_nemo_rl_string, from_safetensors


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two completions each."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "prompts.txt").write_text("12+34=\n7+8=\n")
    arguments = ["--prompts", str(folder / "prompts.txt"), "--traces", str(folder / "traces"), "--max-tokens", "4"]
    for _ in range(2):
        assert main(["sample", str(MODEL_PATH), *arguments]) == 0
    return folder / "traces"


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_is_written(to: str, traces: Path, tmp_path: Path) -> None:
    layers = [] if to in ("megatron", "safetensors") else ["--num-layers", "8"]
    assert main(["export", str(traces), "--to", to, "--out", str(tmp_path / "out"), *layers]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_verl_batch_holds_the_recorded_routes(traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "batch.safetensors"
    assert main(["export", str(traces), "--to", "verl", "--out", str(out), "--step", "1", "--num-layers", "9"]) == 0
    assert "2 of 2 samples as verl" in capsys.readouterr().err
    expected = list(TraceDataset(traces).iter(step=1))
    batch = load_file(out)
    assert batch["routed_experts"].shape == (*batch["input_ids"].shape, 9, 2)
    for row, trace in enumerate(expected):
        assert np.array_equal(batch["routed_experts"][row][batch["replay_mask"][row]][:, :8], trace.routed_experts)
    with safe_open(out, framework="numpy") as file:
        assert json.loads(file.metadata()["sample_ids"]) == [trace.sample_id for trace in expected]


def test_megatron_and_counts_hold_every_recorded_row(traces: Path, tmp_path: Path) -> None:
    for to in ("megatron", "expert-counts"):
        assert main(["export", str(traces), "--to", to, "--out", str(tmp_path / to)]) == 0
    recorded = list(TraceDataset(traces).iter())
    packed, counts = load_file(tmp_path / "megatron"), load_file(tmp_path / "expert-counts")["counts"]
    assert counts.shape == (1, 8, 16)
    starts = packed["cu_seqlens"].tolist()
    for site in range(8):
        chosen = collections.Counter(int(i) for t in recorded for i in t.routed_experts[:, site].reshape(-1))
        assert counts[0, site].tolist() == [chosen[expert] for expert in range(16)]
        for trace, start, end in zip(recorded, starts[:-1], starts[1:], strict=True):
            assert packed["input_ids"][start:end].tolist() == trace.token_ids
            assert np.array_equal(packed[f"router.{site}"][start : end - 1], trace.routed_experts[:, site])


def test_lines_and_safetensors_give_back_the_dataset(traces: Path, tmp_path: Path) -> None:
    dataset = TraceDataset(traces)
    assert main(["export", str(traces), "--to", "nemo-rl-string", "--out", str(tmp_path / "routes.jsonl")]) == 0
    for line in (tmp_path / "routes.jsonl").read_text().splitlines():
        record = json.loads(line)
        trace = dataset[record["sample_id"]]
        assert record["prompt_ids"] + record["completion_ids"] == trace.token_ids
        routes = from_nemo_rl_string(record["routed_experts"], dataset.spec)
        assert np.array_equal(routes.ids, trace.routed_experts)
    assert main(["export", str(traces), "--to", "safetensors", "--out", str(tmp_path / "all.safetensors")]) == 0
    assert from_safetensors(tmp_path / "all.safetensors") == (dataset.spec, list(dataset.iter()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "npz", "--out", "x"], "unknown format 'npz'; known: verl"),
        (["--to", "verl", "--out", "x"], "verl counts all decoder layers"),
        (["--to", "verl", "--out", "x", "--moe-only", "--num-layers", "8"], "not both"),
        (["--to", "safetensors", "--out", "no/such/folder/x"], "no/such/folder"),
        (["--to", "safetensors", "--out", ".", "--step", "0"], "exists"),
        (["--to", "safetensors", "--out", "x", "--step", "7"], "step 7 is not committed"),
    ],
)
def test_a_users_error_is_one_line(
    arguments: list[str], words: str, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(traces), *arguments]) == 1
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
