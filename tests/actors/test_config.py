"""The config and prompts files: what they accept, and the one line that refuses the rest, before Ray or torch load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.config import ConfigError, load_config
from actors.prompts import Prompt, prompts_of_step, read_prompts

ROOT = Path(__file__).parents[2]
MINIMAL = 'model = "m"\ntraces = "out"\nprompts = "p.jsonl"\nsteps = 2\nprompts_per_step = 3\n'


def config_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_relative_paths_count_from_the_config_file_and_a_hub_id_stays(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path, MINIMAL))
    assert (config.traces, config.prompts) == (str(tmp_path / "out"), str(tmp_path / "p.jsonl"))
    assert config.model == "m"
    (tmp_path / "m").mkdir()
    assert load_config(tmp_path / "run.toml").model == str(tmp_path / "m")


def test_the_example_is_valid_and_its_files_exist() -> None:
    config = load_config(ROOT / "examples" / "pipeline.toml")
    assert Path(config.model) == ROOT / "rollout" / "tiny_moe"
    assert config.prompts_per_step <= len(read_prompts(config.prompts))
    assert Path(config.traces).is_absolute()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_sample = 4", r"unknown PipelineConfig key 'num_sample': did you mean 'num_samples'\?"),
        ("[sampling]\nn = 4", r"sampling: unknown SamplingParams key 'n': pass num_samples"),
        ("[sampling]\ntop_p = 0.0", r"sampling.top_p: Input should be greater than 0"),
        (
            "[engine]\nmax_runing_requests = 4",
            r"engine: unknown EngineOptions key .* did you mean 'max_running_requests'",
        ),
        ("[actors]\nnum_actors = 0", r"actors.num_actors: Input should be greater than or equal to 1"),
        ("[actors]\ngpus = 1", r"actors: unknown ActorOptions key 'gpus': did you mean 'num_gpus'"),
        ('on_error = "retry"', r"on_error: Input should be 'stop' or 'skip'"),
        ('run = "a/b"', r"run: String should match pattern"),
        ("steps = 3", r"is not TOML: Cannot overwrite a value"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config_file(tmp_path, MINIMAL + line))


def test_missing_keys_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"traces: Field required; prompts: Field required; steps: Field required"):
        load_config(config_file(tmp_path, 'model = "m"\nprompts_per_step = 1'))


def test_a_dataset_in_a_jobs_copy_of_the_working_directory_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    with pytest.raises(ConfigError, match=r"traces = 'out' lies in the Ray job's copy .* give an absolute path"):
        load_config(config_file(tmp_path, MINIMAL), job)
    neighbour = MINIMAL.replace('"out"', f'"{tmp_path}-data/out"')
    assert load_config(config_file(tmp_path, neighbour), job).traces == f"{tmp_path}-data/out"
    elsewhere = MINIMAL.replace('"out"', '"/data/out"')
    assert load_config(config_file(tmp_path, elsewhere), job).traces == "/data/out"


@pytest.mark.parametrize(
    ("config", "message"),
    [(MINIMAL + "num_sample = 4\n", "did you mean 'num_samples'?"), (MINIMAL, "p.jsonl does not exist")],
)
def test_the_command_ends_with_one_line_and_loads_neither_ray_nor_torch(
    tmp_path: Path, config: str, message: str
) -> None:
    path = config_file(tmp_path, config)
    code = (
        "import sys, actors.pipeline as p\n"
        "try: p.main(sys.argv[1:])\n"
        "finally: assert not {'ray', 'torch'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--config", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_prompts_from_jsonl_and_parquet_are_the_same(tmp_path: Path) -> None:
    jsonl, parquet = tmp_path / "p.jsonl", tmp_path / "p.parquet"
    jsonl.write_text('{"prompt": "1+2=", "key": "a"}\n\n{"prompt_ids": [5, 7]}\n{"prompt": "3+4=", "answer": 7}\n')
    columns = {"prompt": ["1+2=", None, "3+4="], "prompt_ids": [None, [5, 7], None], "key": ["a", None, None]}
    pq.write_table(pa.table({**columns, "answer": [3, 12, 7]}), parquet)
    expected = [Prompt("1+2=", "a"), Prompt([5, 7], "1"), Prompt("3+4=", "2")]
    assert read_prompts(jsonl) == read_prompts(parquet) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', r"p.jsonl line 2 is not JSON"),
        ("[1, 2]", r"line 1 is '\[1, 2\]', need an object"),
        ('{"text": "a"}', r"line 1 needs exactly one of 'prompt' and 'prompt_ids', it has \['text'\]"),
        ('{"prompt": "a", "prompt_ids": [1]}', "needs exactly one of"),
        ('{"prompt": [1, 2]}', r"prompt is \[1, 2\], need text; token ids go into 'prompt_ids'"),
        ('{"prompt_ids": [1, "2"]}', "need a list of integers"),
        ('{"prompt": "a", "key": "x/y"}', "key is 'x/y'"),
        ('{"prompt": "a", "key": "x"}\n{"prompt": "b", "key": "x"}', "has the key 'x' twice"),
        ("", "has no prompts"),
    ],
)
def test_a_wrong_prompt_is_named_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / "p.jsonl")


def test_steps_walk_through_the_file_and_start_again() -> None:
    prompts = [Prompt(letter, letter) for letter in "abcde"]
    keys = ["".join(p.key for p in prompts_of_step(prompts, step, 3)) for step in range(4)]
    assert keys == ["abc", "dea", "bcd", "eab"]
    with pytest.raises(ConfigError, match="prompts_per_step is 6, but the prompts file has 5"):
        prompts_of_step(prompts, 0, 6)
