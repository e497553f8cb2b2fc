"""The pipeline: S steps with stable sample ids, resumed at the first uncommitted one, killed or not."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from actors.config import ConfigError, PipelineConfig, load_config
from actors.pipeline import run
from storage import DatasetInUseError, Lease, RoutingSpec, Trace, TraceDataset, TraceWriter
from tests.actors.fake_pipeline import fake_client
from tests.actors.waiting import eventually

ROOT = Path(__file__).parents[2]
REAL = ROOT / "rollout" / "tiny_moe"
ENDLESS = 10_000
"""Steps of a run that a test ends: no machine finishes it first."""


def write_run(
    folder: Path,
    *,
    steps: int,
    milliseconds: int = 0,
    model: str = "fake",
    on_error: str = "stop",
    num_actors: int = 1,
    traces: str = "traces",
    extra: str = "",
) -> Path:
    """A config of 5 prompts, 2 per step, 3 samples each; the fake takes `milliseconds` per sample."""
    prompts = [{"prompt_ids": [10 + i, milliseconds], "key": f"p{i}"} for i in range(5)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    path = folder / "run.toml"
    path.write_text(
        f'model = "{model}"\ntraces = "{traces}"\nrun = "r"\nprompts = "prompts.jsonl"\n'
        f'steps = {steps}\nprompts_per_step = 2\nnum_samples = 3\non_error = "{on_error}"\n'
        f"[sampling]\nseed = 0\nmax_tokens = 8\n[actors]\nnum_actors = {num_actors}\nnum_cpus = 0.5\n{extra}"
    )
    return path


def write_rest(folder: Path, **options: Any) -> Path:
    """A config that ends two steps behind those that are there, which are whole, and two at the least."""
    steps, torn = divmod(len(stored_ids(folder / "traces")), 6)
    assert 2 <= steps < ENDLESS
    assert torn == 0
    return write_run(folder, steps=steps + 2, **options)


def expected_ids(steps: int) -> set[str]:
    return {f"r/{step}/p{(step * 2 + i) % 5}/{j}" for step in range(steps) for i in range(2) for j in range(3)}


def stored_ids(traces: Path) -> list[str]:
    return [row[0] for row in duckdb.sql(f"select sample_id from '{traces}/step-*/*.parquet'").fetchall()]


def assert_complete(config: PipelineConfig) -> None:
    """Exactly the expected sample ids, each once, in a sound dataset."""
    ids = stored_ids(Path(config.traces))
    assert sorted(ids) == sorted(expected_ids(config.steps))
    assert TraceDataset(config.traces).verify() == []


@contextmanager
def driver(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A pipeline process with a Ray cluster of its own; killed at the end if it still runs."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    env.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


@pytest.mark.usefixtures("cluster")
def test_it_commits_the_steps_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    assert run(load_config(write_run(tmp_path, steps=2)), fake_client) == [0, 1]
    config = load_config(write_run(tmp_path, steps=4))
    assert run(config, fake_client) == [2, 3]
    assert_complete(config)


def test_a_second_pipeline_on_the_same_dataset_is_refused_before_it_samples(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, steps=1))
    with Lease(config.traces, owner="pipeline, run 'other'"):
        with pytest.raises(DatasetInUseError, match=r"traces is in use by process \d+ on .*run 'other'"):
            run(config, fake_client)
    assert not (tmp_path / "traces/_dataset.json").exists()


@pytest.mark.usefixtures("cluster")
def test_a_step_that_fails_is_not_committed_and_comes_again(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, steps=3))
    with pytest.raises(ValueError, match="sample r/1/p3/1 hit a bad kernel"):
        run(config, functools.partial(fake_client, fail_at="r/1/p3/1"))
    assert set(stored_ids(Path(config.traces))) == expected_ids(1)
    assert run(config, fake_client) == [1, 2]
    assert_complete(config)


@pytest.mark.usefixtures("cluster")
@pytest.mark.full
def test_a_sample_that_always_fails_stops_the_run_with_a_remedy_or_is_skipped(tmp_path: Path, caplog) -> None:
    failing = functools.partial(fake_client, error_at="r/1/p3/1")
    config = load_config(write_run(tmp_path, steps=2))
    message = r"step 1 is not committed: sample r/1/p3/1 failed: no free slot.*key 'p3'.*on_error = \"skip\""
    with pytest.raises(RuntimeError, match=message):
        run(config, failing)
    assert set(stored_ids(Path(config.traces))) == expected_ids(1)
    assert run(load_config(write_run(tmp_path, steps=2, on_error="skip")), failing) == [1]
    assert sorted(stored_ids(Path(config.traces))) == sorted(expected_ids(2) - {"r/1/p3/1"})
    assert "sample r/1/p3/1 failed: no free slot; step 1 goes on without it" in caplog.text
    assert TraceDataset(config.traces).verify() == []


def test_nothing_to_do_starts_nothing(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, steps=1))
    (Path(config.traces) / "step-000000000").mkdir(parents=True)
    (Path(config.traces) / "step-000000000" / "_manifest.json").touch()
    assert run(config, make_client=None) == []  # type: ignore[arg-type]


@pytest.mark.chaos
def test_killed_in_mid_step_and_started_again_it_ends_with_exactly_the_expected_samples(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=ENDLESS, milliseconds=60)
    with driver("-m", "tests.actors.fake_pipeline", str(path)) as process:
        assert eventually(lambda: (tmp_path / "traces" / "step-000000001").exists(), seconds=60)
        process.send_signal(signal.SIGKILL)
    path = write_rest(tmp_path)
    with driver("-m", "tests.actors.fake_pipeline", str(path)) as process:
        finish(process)
    assert_complete(load_config(path))


@pytest.mark.chaos
def test_a_run_that_is_told_to_stop_abandons_its_step_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """What `ray job stop` sends first."""
    path = write_run(tmp_path, steps=ENDLESS, milliseconds=60)
    with driver("-m", "tests.actors.fake_pipeline", str(path)) as process:
        assert eventually(lambda: (tmp_path / "traces" / "step-000000001").exists(), seconds=60)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "stopped by SIGTERM" in output
    assert list((tmp_path / "traces" / "_staging").iterdir()) == []
    assert TraceDataset(tmp_path / "traces").verify() == []
    path = write_rest(tmp_path)
    with driver("-m", "tests.actors.fake_pipeline", str(path)) as process:
        finish(process)
    assert_complete(load_config(path))


@pytest.mark.chaos
@pytest.mark.parametrize("kill_after", [0.0, 0.3, 0.7])
def test_the_real_command_killed_at_any_moment_resumes(tmp_path: Path, kill_after: float) -> None:
    real = {"milliseconds": 11, "model": str(REAL), "extra": '[engine]\ndtype = "float32"\n'}
    path = write_run(tmp_path, steps=ENDLESS, **real)
    command = ("-m", "actors.pipeline", "--config", str(path))
    with driver(*command) as process:
        assert eventually(lambda: (tmp_path / "traces" / "step-000000001").exists(), seconds=90)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(kill_after)
        process.send_signal(signal.SIGKILL)
    write_rest(tmp_path, **real)
    with driver(*command) as process:
        assert "done: " in finish(process)
    assert_complete(load_config(path))


@pytest.mark.full
def test_a_model_that_is_not_there_ends_the_command_with_one_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=1, model="/nowhere/model")
    with driver("-m", "actors.pipeline", "--config", str(path)) as process:
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "/nowhere/model" in line


def test_steps_that_were_dropped_are_not_sampled_again(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, steps=2))
    with TraceWriter(config.traces, RoutingSpec.uniform(num_sites=1, num_experts=4, top_k=1)) as writer:
        for step in (0, 1):
            writer.write([], step=step)
            writer.commit(step)
    TraceDataset(config.traces).keep_from(1)
    assert run(config, make_client=None) == []  # type: ignore[arg-type]


def test_going_on_with_other_sampling_parameters_is_refused_by_name(tmp_path: Path) -> None:
    """A dataset half of one temperature and half of another would not show it."""
    config = load_config(write_run(tmp_path, steps=2))
    spec = RoutingSpec.uniform(num_sites=1, num_experts=4, top_k=1)
    before = config.sampling.model_copy(update={"temperature": 0.3}).model_dump(mode="json")
    trace = Trace("r/0/p0/0", 0, [5], [7], [-1.0], np.zeros((1, 1, 1), np.uint8), "length", sampling_params=before)
    with TraceWriter(config.traces, spec) as writer:
        writer.write([trace], step=0)
        writer.commit(step=0)
    with pytest.raises(ConfigError, match=r"begun with another configuration: \{'temperature': '0.3 -> 1.0'\}"):
        run(config, make_client=None)  # type: ignore[arg-type]
