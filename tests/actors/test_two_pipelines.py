"""One dataset, several pipelines: at once by mistake, in turn with other actors, and when it may not be written."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from pathlib import Path

import duckdb
import pytest

from actors.config import load_config
from actors.pipeline import run
from storage import Lease, TraceDataset
from tests.actors.fake_pipeline import fake_client
from tests.actors.test_pipeline import ENDLESS, assert_complete, driver, expected_ids, finish, write_run
from tests.actors.waiting import eventually

pytestmark = pytest.mark.full


def counts(folder: Path) -> tuple[int, int]:
    query = f"select count(*), count(distinct sample_id) from '{folder}/traces/*-*/*.parquet'"
    return duckdb.sql(query).fetchall()[0]


def test_of_two_that_are_started_at_once_one_works_and_the_other_names_it(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=6, milliseconds=90)
    command = ("-m", "tests.actors.fake_pipeline", str(path))
    with driver(*command) as one, driver(*command) as other:
        outputs = {process.pid: process.communicate(timeout=150)[0] for process in (one, other)}
        ended = {process.pid: process.returncode for process in (one, other)}
    assert sorted(ended.values()) == [0, 1], outputs
    winner, loser = sorted(ended, key=lambda pid: ended[pid])
    assert f"is in use by process {winner} on " in outputs[loser]
    assert "(pipeline, run 'r', since 20" in outputs[loser]
    assert_complete(load_config(path))
    assert counts(tmp_path) == (36, 36)


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=1)
    with Lease(tmp_path / "traces", owner="pipeline, run 'first'"):
        with driver("-m", "actors.pipeline", "--config", str(path)) as process:
            output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = output.splitlines()
    assert line.startswith(f"error: {tmp_path / 'traces'} is in use by process ")
    assert line.endswith("wait for it, stop it, or choose another directory")


def test_killed_with_one_actor_and_gone_on_with_three_then_two(tmp_path: Path) -> None:
    path = write_run(tmp_path, steps=ENDLESS, milliseconds=60, num_actors=1)
    with driver("-m", "tests.actors.fake_pipeline", str(path)) as process:
        assert eventually(lambda: (tmp_path / "traces" / "step-000000001").exists(), seconds=90)
        process.send_signal(signal.SIGKILL)
    committed = counts(tmp_path)[0]
    assert 12 <= committed < 6 * ENDLESS
    assert committed % 6 == 0
    for steps, num_actors in ((committed // 6 + 2, 3), (committed // 6 + 4, 2)):
        path = write_run(tmp_path, steps=steps, milliseconds=11, num_actors=num_actors)
        with driver("-m", "tests.actors.fake_pipeline", str(path)) as process:
            finish(process)
        assert counts(tmp_path) == (6 * steps, 6 * steps)
    assert_complete(load_config(path))


@pytest.fixture
def immutable(tmp_path: Path):
    """Makes a folder read-only, for root too; made writable again at the end."""
    if shutil.which("chattr") is None:
        pytest.skip("needs chattr")
    probe = tmp_path / "probe"
    probe.mkdir()
    if subprocess.run(["chattr", "+i", str(probe)], capture_output=True).returncode != 0:
        pytest.skip("this user or this file system has no immutable folders")
    subprocess.run(["chattr", "-i", str(probe)], check=True)
    folder = tmp_path / "traces"
    yield lambda on: subprocess.run(["chattr", "+i" if on else "-i", str(folder)], check=True)
    subprocess.run(["chattr", "-i", str(folder)], check=True)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("sinks", [1, 2])
def test_a_dataset_that_becomes_read_only_ends_the_run_and_keeps_what_it_has(
    tmp_path: Path, immutable, sinks: int
) -> None:
    extra = f"num_sinks = {sinks}\n"
    config = load_config(write_run(tmp_path, steps=ENDLESS, milliseconds=60, extra=extra))

    def deny() -> None:
        assert eventually(lambda: (tmp_path / "traces" / "step-000000000").exists(), seconds=60)
        immutable(True)

    thread = threading.Thread(target=deny)
    thread.start()
    with pytest.raises(PermissionError, match=r"not permitted \(step \d was abandoned and may be written again\)"):
        run(config, fake_client)
    thread.join()
    done = TraceDataset(config.traces).steps
    assert done == list(range(len(done))) != []
    assert list((tmp_path / "traces" / "_staging").iterdir()) == []
    immutable(False)
    config = load_config(write_run(tmp_path, steps=len(done) + 2, extra=extra))
    assert run(config, fake_client) == [len(done), len(done) + 1]
    assert_complete(config)
    assert len(expected_ids(config.steps)) == 6 * config.steps == counts(tmp_path)[1]
