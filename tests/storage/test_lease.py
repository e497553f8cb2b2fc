"""One holder of a dataset at a time; a dead one holds nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage import DatasetInUseError, Lease

HOLD = """
import sys
from storage import Lease
lease = Lease(sys.argv[1], owner="pipeline, run 'first'")
print("held", flush=True)
sys.stdin.read()
"""


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    with Lease(tmp_path, owner="the first"):
        with pytest.raises(
            DatasetInUseError, match=rf"in use by process {os.getpid()} on .* \(the first, since 20\d\d-.*stop it"
        ):
            Lease(tmp_path, owner="the second")
    with Lease(tmp_path, owner="the third"):
        pass


def test_a_killed_holder_is_taken_over_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(DatasetInUseError, match=rf"process {holder.pid} on .*run 'first'"):
            Lease(tmp_path, owner="the second")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with caplog.at_level(logging.WARNING), Lease(tmp_path, owner="the second"):
        assert f"from process {holder.pid}" in caplog.text


def test_a_release_is_no_death(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lease = Lease(tmp_path, owner="a")
    lease.release()
    lease.release()
    with caplog.at_level(logging.WARNING), Lease(tmp_path, owner="b"):
        assert caplog.text == ""


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"pid": 1}'])
def test_a_holder_that_cannot_be_read_still_holds(tmp_path: Path, text: str) -> None:
    with Lease(tmp_path, owner="a"):
        (tmp_path / "_lease.json").write_text(text)
        with pytest.raises(DatasetInUseError, match="in use by another process"):
            Lease(tmp_path, owner="b")
