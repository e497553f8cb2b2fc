"""A disk that is full while a pipeline writes over Ray: the run ends, says so, and goes on once there is room."""

from __future__ import annotations

import errno
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.config import load_config
from actors.pipeline import run
from storage import TraceDataset
from tests.actors.fake_pipeline import fake_client
from tests.actors.test_pipeline import ENDLESS, assert_complete, expected_ids, stored_ids, write_run
from tests.actors.waiting import eventually


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("this user cannot mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)  # also while an actor that failed has a file open


def fill(path: Path) -> None:
    """Take all the room that is left."""
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left") as full:
        while True:
            file.write(bytes(4096))
    assert full.value.errno == errno.ENOSPC


@pytest.mark.full
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("sinks", [1, 2])
def test_a_full_disk_ends_the_run_keeps_what_is_committed_and_another_run_goes_on(
    tmp_path: Path, disk: Path, sinks: int
) -> None:
    extra = f"num_sinks = {sinks}\n"
    options = {"milliseconds": 60, "traces": str(disk / "traces"), "extra": extra}
    config = load_config(write_run(tmp_path, steps=ENDLESS, **options))
    traces = Path(config.traces)

    def fill_behind_step_0() -> None:
        assert eventually(lambda: (traces / "step-000000000").exists(), seconds=60)
        fill(disk / "other-data")

    thread = threading.Thread(target=fill_behind_step_0)
    thread.start()
    try:
        with pytest.raises(OSError, match=r"No space left on device \(step \d+ was abandoned and may be written again"):
            run(config, fake_client)
    finally:
        thread.join()
    done = TraceDataset(traces).steps
    assert done[:1] == [0]
    assert len(done) < ENDLESS
    assert set(stored_ids(traces)) == expected_ids(len(done))
    assert TraceDataset(traces).verify() == []
    assert list((traces / "_staging").iterdir()) == []
    (disk / "other-data").unlink()
    config = load_config(write_run(tmp_path, steps=len(done) + 2, **options))
    assert run(config, fake_client) == [len(done), len(done) + 1]
    assert_complete(config)
