"""README.md and run.json of a dataset: made once, readable by `load_dataset`, without secrets, in nobody's way."""

from __future__ import annotations

import json
import platform
import re
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import TraceDataset, TraceWriter, repair_dataset, verify_dataset
from storage.redact import HIDDEN, without_secrets
from tests.storage.builders import SPEC, commit, make_traces


def front_matter(text: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    _, front, _ = text.split("---\n", 2)
    return yaml.safe_load(front)


def test_the_first_writer_makes_both_and_no_later_one_changes_them(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC, run={"model": "first"}):
        pass
    before = {name: (tmp_path / name).read_text() for name in ("README.md", "run.json")}
    with TraceWriter(tmp_path, SPEC, run={"model": "second"}) as writer:
        writer.write(make_traces(0), step=0)
        writer.commit(0)
    assert {name: (tmp_path / name).read_text() for name in before} == before
    noted = json.loads(before["run.json"])
    assert (noted["format_version"], noted["model"]) == ("1", "first")
    assert noted["versions"]["python"] == platform.python_version()
    assert noted["versions"]["pyarrow"] == version("pyarrow")
    assert front_matter(before["README.md"])["configs"] == [
        {"config_name": "default", "data_files": [{"split": "train", "path": "*-*/*.parquet"}]}
    ]
    assert (verify_dataset(tmp_path), repair_dataset(tmp_path)) == ([], [])


def test_of_writers_that_race_one_makes_them(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def create(number: int) -> None:
        barrier.wait()
        TraceWriter(tmp_path / "t", SPEC, run={"number": number}).close()

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((tmp_path / "t/run.json").read_text())["number"] in range(4)
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "README.md", "_dataset.json", "_staging", "run.json",
    ]  # fmt: skip
    assert not list((tmp_path / "t/_staging").iterdir())


def test_a_readme_that_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my project")
    commit(tmp_path, 0)
    assert (tmp_path / "README.md").read_text() == "my project"
    assert (tmp_path / "run.json").exists()
    assert verify_dataset(tmp_path) == []


def test_verify_names_a_damaged_run_json_and_readers_go_on(tmp_path: Path) -> None:
    commit(tmp_path, 0)
    (tmp_path / "run.json").write_text('{"format_version": "1"')
    (problem,) = verify_dataset(tmp_path)
    assert problem.startswith(f"{tmp_path}/run.json: JSONDecodeError")
    assert repair_dataset(tmp_path) == []
    assert list(TraceDataset(tmp_path)) == make_traces(0)
    (tmp_path / "run.json").unlink()
    (tmp_path / "README.md").unlink()
    assert verify_dataset(tmp_path) == []


def test_load_dataset_opens_the_directory_before_and_after_compaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commit(tmp_path / "t", 0, 3)
    with TraceWriter(tmp_path / "t", SPEC) as writer:
        writer.write(make_traces(4), step=4)  # staged, not committed
        before = datasets.load_dataset(str(tmp_path / "t"), cache_dir=str(tmp_path / "cache"))
    TraceDataset(tmp_path / "t").compact()
    after = datasets.load_dataset(str(tmp_path / "t"), split="train", cache_dir=str(tmp_path / "cache"))
    assert list(before) == ["train"]
    expected = [trace.sample_id for trace in make_traces(0) + make_traces(3)]
    assert before["train"]["sample_id"] == after["sample_id"] == expected
    for row, trace in zip(after, make_traces(0) + make_traces(3), strict=True):
        ids = np.frombuffer(b"".join(row["routed_experts"]), "uint8").reshape(-1, 3, 2)  # as the card says
        np.testing.assert_array_equal(ids, trace.routed_experts)


def test_beside_archived_steps_the_others_load_as_the_card_says(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    commit(tmp_path / "t", 0, 1, 2)
    TraceDataset(tmp_path / "t").archive(before=2)
    (call,) = re.findall(r'load_dataset\("parquet".*?\)', (tmp_path / "t/README.md").read_text())
    call = call.replace("PATH-OF-THIS-DIRECTORY", str(tmp_path / "t"))
    rows = eval(call.replace(")", f", split='train', cache_dir={str(tmp_path / 'cache')!r})"), vars(datasets))
    assert rows["sample_id"] == [trace.sample_id for trace in make_traces(2)]


SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    "given",
    [
        {"api_key": SECRET, "db_pwd": SECRET, "container": {"env": [f"NAME={SECRET}"]}},
        {"engine": {"hf_token": SECRET, "apiKey": SECRET, "HF-Token": SECRET, "dbPassword": SECRET}},
        {"actors": {"runtime_env": {"env_vars": {"WANDB": SECRET, "HOME": SECRET}}}},
        {"extra_headers": {"X-Tenant": SECRET}, "credentials": [SECRET], "aws_secret_access_key_file": SECRET},
        {"url": f"https://me:{SECRET}@gpu:8000/v1", "also": f"s3://bucket/x?X-Amz-Signature={SECRET}"},
        {"command": ["--auth", "Bearer " + SECRET * 2], "note": "hf_" + "hunter2hunter2" * 2, "n": {SECRET: 1}.keys()},
    ],
)
def test_no_secret_is_written(tmp_path: Path, given: dict[str, Any]) -> None:
    with TraceWriter(tmp_path, SPEC, run={"model": "m", **given}):
        pass
    text = (tmp_path / "run.json").read_text() + (tmp_path / "README.md").read_text()
    assert "hunter2" not in text
    assert json.loads((tmp_path / "run.json").read_text())["model"] == "m"


def test_what_is_no_secret_is_written_as_it_is() -> None:
    given = {"kv_tokens": 64, "eos_token_id": 2, "max_tokens": 5, "auth_required": True, "top_p": 0.9, "stop": ["a"]}
    assert without_secrets(given) == given
    assert without_secrets({"rate": float("inf"), "password": 1234, "who": object()}) == {
        "rate": "inf", "password": HIDDEN, "who": "<object>",
    }  # fmt: skip
    arguments = ["serve", "--api-key", "k1", "--port", "80", "--hf-token=k2", "--kv-tokens=64", ["x.password=k3", 4]]
    assert without_secrets({"a": [{"args": arguments}], "cmd": "DB_PWD=k4 run --token k5 --key-size 8"}) == {
        "a": [{"args": ["serve", "--api-key", HIDDEN, "--port", "80", f"--hf-token={HIDDEN}", "--kv-tokens=64",
                        [f"x.password={HIDDEN}", 4]]}],
        "cmd": f"DB_PWD={HIDDEN} run --token {HIDDEN} --key-size 8",
    }  # fmt: skip
    for text in (
        "s3://bucket/traces",
        "/data/key=4/part.parquet",
        "hf-internal-testing/tiny-random-MixtralForCausalLM",
        "/data/hf_models/qwen3-30b-a3b-instruct",
        "/data/skills-math-v2-verified.jsonl",
    ):
        assert without_secrets(text) == text
