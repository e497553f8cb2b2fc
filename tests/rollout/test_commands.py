"""The command line: what it prints, its exit codes, and that `--help` needs no torch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollout.__main__ import main
from rollout.tiny_moe import MODEL_PATH
from storage import RoutingSpec, Site, Trace, TraceDataset, TraceWriter
from tests.storage.builders import commit

HELP_IMPORTS = """
import sys
from rollout.__main__ import main
try:
    main(["--help"])
except SystemExit:
    pass
print([name for name in ("torch", "transformers", "ray", "pyarrow", "numpy") if name in sys.modules])
"""


def test_help_answers_before_anything_heavy_is_imported() -> None:
    out = subprocess.run([sys.executable, "-c", HELP_IMPORTS], capture_output=True, text=True, check=True).stdout
    assert "COMMAND" in out
    assert out.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "traces"
    assert main(["demo", "--out", str(out)]) == 0
    return out


def test_demo_commits_a_sound_dataset_with_rewards(demo: Path) -> None:
    dataset = TraceDataset(demo)
    rewards = [trace.reward for trace in dataset.iter()]
    assert len(dataset) == 400
    assert dataset.verify() == []
    assert 0.2 < sum(rewards) / 400 < 0.6
    assert {(t.reward == 1.0) == (t.text == t.metadata["answer"]) for t in dataset.iter()} == {True}


def test_demo_adds_a_step_when_run_again(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = TraceDataset(demo).steps
    assert main(["demo", "--out", str(demo)]) == 0
    assert TraceDataset(demo).steps == [*before, before[-1] + 1]
    assert "8 of 8 routers" in capsys.readouterr().out


def test_inspect_prints_the_figures(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(demo)]) == 0
    assert "8 sites, top 2, 16 bytes per token" in capsys.readouterr().out


def test_inspect_as_json_counts_numbers_and_times_every_sample(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(demo), "--json", "--step", "0", "--slowest", "2"]) == 0
    figures = json.loads(capsys.readouterr().out)
    longest = sorted((trace.seconds for trace in TraceDataset(demo).iter(0)), reverse=True)
    assert [each["seconds"] for each in figures["slowest"]] == longest[:2]
    assert 0 < longest[-1] <= longest[0] < 600
    assert (figures["samples"], figures["steps"]["count"], figures["seconds_per_sample"]["count"]) == (400, 1, 400)


def test_inspect_names_routers_that_share_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = [Site(f"model.layers.{layer}.{kind}.router", layer, 4, 1) for layer in (0, 1) for kind in ("att", "mlp")]
    with TraceWriter(tmp_path, RoutingSpec(tuple(sites))) as writer:
        routes = np.array([[[3], [0], [1], [2]]], np.uint8)
        fields = {"prompt_ids": [5], "completion_ids": [6], "logprobs": [-1.0], "finish_reason": "stop"}
        writer.write([Trace(sample_id="a", step=0, routed_experts=routes, **fields)], step=0)
        writer.commit(0)
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert [name in printed for name in ("0.att.router", "1.mlp.router")] == [True, True]


def test_verify_exits_with_1_and_names_the_file_that_was_cut_short(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(demo)]) == 0
    part = next(demo.glob("step-*/*.parquet"))
    content = part.read_bytes()
    try:
        part.write_bytes(content[: len(content) // 2])
        assert main(["verify", str(demo)]) == 1
    finally:
        part.write_bytes(content)
    assert part.name in capsys.readouterr().out


def test_what_a_writer_of_another_host_left_is_named_and_removed_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, 0)
    left = tmp_path / "_staging" / f"000000001-pod-1-{'0' * 32}"
    left.mkdir()
    os.utime(left, (86_400, 86_400))  # nobody wrote there for an hour
    assert main(["verify", str(tmp_path), "--repair"]) == 1
    printed = capsys.readouterr().out
    assert f"{left}: of a writer on host pod-1" in printed
    assert f"`moe-rollout verify {tmp_path} --repair --all-hosts` removes it" in printed
    assert main(["verify", str(tmp_path), "--all-hosts"]) == 1
    assert "error: --all-hosts says whose remains --repair removes" in capsys.readouterr().err
    assert main(["verify", str(tmp_path), "--repair", "--all-hosts"]) == 0
    assert capsys.readouterr().err == f"removed {left}\n{tmp_path}: 0 problems\n"
    assert not left.exists()


def test_archive_rewrites_the_old_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit(tmp_path, 0, 1, 2)
    before = list(TraceDataset(tmp_path))
    assert main(["archive", str(tmp_path), "--before", "2"]) == 0
    (pack,) = tmp_path.glob("pack-000000000-000000001-*")
    assert capsys.readouterr().err == f"{pack}\n"
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000002"]
    assert list(TraceDataset(tmp_path)) == before


def test_sample_reads_stdin_and_prints_json_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+2=\n\n30+4=\n"))
    arguments = ["--temperature", "0", "--max-tokens", "5", "--dtype", "float32", "--num-samples", "2"]
    assert main(["sample", str(MODEL_PATH), *arguments]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["sample_id"] for r in records] == ["run/0/0-0/0", "run/0/0-0/1", "run/0/0-1/0", "run/0/0-1/1"]
    assert records[0]["text"] == records[1]["text"] == "3"


def test_sample_reads_jsonl_and_commits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n{"prompt_ids": [4, 13, 5, 14]}\n')
    assert main(["sample", str(MODEL_PATH), "--prompts", str(prompts), "--traces", str(tmp_path / "traces")]) == 0
    dataset = TraceDataset(tmp_path / "traces")
    assert dataset["run/0/0-1/0"].prompt_ids == [4, 13, 5, 14]
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sample", "no/such/model", "--prompts", "-"], "holds no prompts"),
        (["sample", str(MODEL_PATH), "--prompts", "missing.txt"], "'missing.txt' does not exist"),
        (["sample", str(MODEL_PATH), "--top-p", "0"], "top_p"),
        (["inspect", "missing-traces"], "missing-traces"),
        (["verify", "missing-traces"], "missing-traces"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_1(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(arguments) == 1
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("arguments", [("archive", "d", "--before", "-4"), ("inspect", "d", "--slowest", "-1")])
def test_a_number_below_0_is_refused_by_name(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert f"argument {arguments[-2]}: '{arguments[-1]}' is not a whole number from 0" in capsys.readouterr().err
