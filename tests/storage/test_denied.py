"""Permission denied and a full file system in mid-step, from the kernel and not from a stand-in.

Root may write everywhere, so the writer is a child that gives its rights up; the full file system is a tmpfs of one
mebibyte in a mount namespace of its own, where the kernel lets the user have one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from storage import TraceDataset
from tests.storage.builders import make_traces

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

DENIED = """
import os, sys, tempfile
from pathlib import Path
from storage import TraceDataset, TraceWriter
from tests.storage.builders import SPEC, commit, make_traces

root, where = Path(sys.argv[1]), sys.argv[2]
with tempfile.TemporaryDirectory() as other:
    commit(Path(other), 0, 1)  # all that is imported late is imported while we may
    TraceDataset(other).verify()
if os.getuid() == 0:
    os.setuid(65534)
writer = TraceWriter(root, SPEC, max_part_bytes=1)
writer.write(make_traces(0), step=0)
writer.commit(0)
writer.write(make_traces(1, 16), step=1)  # a row group, so a whole file
(entry,) = (root / "_staging").iterdir()
denied = {"staging": entry, "dataset": root}[where]
denied.chmod(0o500)
try:
    writer.write(make_traces(1, 32)[16:], step=1)
    writer.commit(1)
except PermissionError as error:
    print(error)
denied.exists() and denied.chmod(0o755)
assert TraceDataset(root).steps == [0]
writer.close()
with TraceWriter(root, SPEC) as writer:  # which removes what could not be removed then
    assert list((root / "_staging").iterdir()) == []
    writer.write(make_traces(1), step=1)
    writer.commit(1)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that a user without rights can reach and write to."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder / "traces"
    shutil.rmtree(folder)


def assert_whole(root: Path) -> None:
    assert list(TraceDataset(root)) == make_traces(0) + make_traces(1)
    assert TraceDataset(root).verify() == []
    query = f"select count(*), count(distinct sample_id) from '{root}/*-*/*.parquet'"
    assert duckdb.sql(query).fetchall() == [(10, 10)]


@pytest.mark.parametrize("where", ["staging", "dataset"])
def test_permission_denied_in_mid_step(open_folder: Path, where: str) -> None:
    command = [sys.executable, "-c", DENIED, str(open_folder), where]
    output = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "Permission denied (step 1 was abandoned and may be written again)" in output
    assert f"'{open_folder}" in output
    assert_whole(open_folder)


ANOTHERS = """
import os, sys
from pathlib import Path
from storage import TraceDataset, TraceWriter
from tests.storage.builders import SPEC, commit, make_traces

root = Path(sys.argv[1])
commit(root, 0)
os.umask(0o077)
elsewhere = root / "_staging" / f"000000001-another-host-{'0' * 32}"
elsewhere.mkdir()
os.utime(elsewhere, (86_400, 86_400))
if os.getuid() == 0:
    root.chmod(0o777)
    (root / "_staging").chmod(0o777)
    os.setuid(65534)
else:
    elsewhere.chmod(0)
with TraceWriter(root, SPEC) as writer:
    writer.write(make_traces(1), step=1)
    writer.commit(1)
print(TraceDataset(root).verify())
elsewhere.exists() and os.getuid() != 65534 and elsewhere.chmod(0o700)
"""


def test_staging_of_another_user_on_another_host_does_not_stop_a_writer(open_folder: Path) -> None:
    command = [sys.executable, "-c", ANOTHERS, str(open_folder)]
    output = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "another-host, which cannot be judged (Permission denied); if no writer runs there" in output
    (open_folder / "_staging" / f"000000001-another-host-{'0' * 32}").rmdir()
    assert_whole(open_folder)


UNREADABLE = """
import os, sys
from pathlib import Path
from storage import DamagedDataError, TraceDataset
from tests.storage.builders import commit, make_traces

root = Path(sys.argv[1])
commit(root, 0, 1)
TraceDataset(root).annotate(0, {"run/0/0/0": {"reward": 1.0}})
TraceDataset(root).verify()  # all that is imported late is imported while we may
(root / "lost+found").mkdir()
closed = [root / "lost+found", root / "step-000000001", root / "_annotations" / "step-000000000"]
if os.getuid() == 0:
    for path in (root, root / "_staging"):
        path.chmod(0o777)
for path in closed:
    path.chmod(0o700 if os.getuid() == 0 else 0)
os.getuid() or os.setuid(65534)
for problem in TraceDataset(root).verify():
    print(problem)
try:
    list(TraceDataset(root).iter(1))
except DamagedDataError as error:
    print(error)
for path in closed:
    os.getuid() == 65534 or path.chmod(0o700)
"""


def test_verify_names_what_this_user_cannot_look_into_if_it_belongs_to_the_dataset(open_folder: Path) -> None:
    command = [sys.executable, "-c", UNREADABLE, str(open_folder)]
    output = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout
    annotations, step, read = output.splitlines()
    assert annotations == f"[Errno 13] Permission denied: '{open_folder}/_annotations/step-000000000'"
    assert step.startswith(f"{open_folder}/step-000000001/_manifest.json: PermissionError: ")
    assert read == step


FULL = """
import errno, shutil, sys
from pathlib import Path
from storage import TraceDataset, TraceWriter
from tests.storage.builders import SPEC, make_trace, make_traces

root, saved = Path(sys.argv[1], "traces"), sys.argv[2]
with TraceWriter(root, SPEC) as writer:
    writer.write(make_traces(0), step=0)
    writer.commit(0)
    try:
        for sample in range(64):
            writer.write([make_trace(1, sample, completion=20_000)], step=1)
        writer.commit(1)
    except OSError as error:
        assert error.errno == errno.ENOSPC
        print(error)
    assert list((root / "_staging").iterdir()) == []
    assert TraceDataset(root).verify() == []
    writer.write(make_traces(1), step=1)  # there is room again
    writer.commit(1)
shutil.copytree(root, saved)
"""


def can_mount() -> bool:
    return shutil.which("unshare") is not None and subprocess.run(["unshare", "-m", "true"]).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs a mount namespace (unshare -m)")
def test_a_file_system_that_is_full_in_mid_step(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1" "$4"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(small), sys.executable, FULL, str(tmp_path / "saved")]
    output = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "No space left on device (step 1 was abandoned and may be written again)" in output
    assert_whole(tmp_path / "saved")
