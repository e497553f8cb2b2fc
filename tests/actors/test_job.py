"""`ray job submit` and `ray job stop` of the real command on a real cluster: its step is abandoned cleanly."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.config import load_config
from storage import Lease, TraceDataset
from tests.actors.test_pipeline import ENDLESS, REAL, ROOT, assert_complete, stored_ids, write_run
from tests.actors.waiting import eventually
from tests.s3 import free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

HEAD = """
import sys
from ray.cluster_utils import Cluster
names = ("dashboard_port", "dashboard_agent_listen_port")
ports = dict(zip(names, map(int, sys.argv[1:])))
args = {"num_cpus": 2, "include_dashboard": True, "dashboard_host": "127.0.0.1", "object_store_memory": 100_000_000}
cluster = Cluster(initialize_head=True, head_node_args=args | ports)
print("up", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def environment() -> dict[str, str]:
    """Both sides ask for the token that Ray keeps in the home directory."""
    ours = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token"}
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | ours


@pytest.fixture
def address() -> Iterator[str]:
    """A cluster with a job server, which ends with the test."""
    port, agent_port = free_port(), free_port()
    with subprocess.Popen(
        [sys.executable, "-c", HEAD, str(port), str(agent_port)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as head:
        assert head.stdout is not None
        try:
            assert "up\n" in iter(head.stdout.readline, "")
            yield f"http://127.0.0.1:{port}"
        finally:
            assert head.stdin is not None
            head.stdin.close()
            head.wait(30)


def ray_job(address: str, *arguments: str) -> str:
    """`ray job ...` as a user types it; its output. A cluster that has just started may ask to try again later."""
    verb, *rest = arguments
    command = [str(Path(sys.executable).parent / "ray"), "job", verb, "--address", address, *rest]
    end = time.monotonic() + 90
    while True:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), timeout=120
        )
        if done.returncode == 0:
            return done.stdout
        assert "try again later" in done.stdout, done.stdout
        assert time.monotonic() < end, done.stdout
        time.sleep(1)


def submit(address: str, path: Path, name: str) -> None:
    """The command of the README: the config's folder is the job's working directory."""
    entry = ["--", sys.executable, "-m", "actors.pipeline", "--config", str(path)]
    ray_job(address, "submit", "--no-wait", "--submission-id", name, "--working-dir", str(path.parent), *entry)


def test_a_job_that_is_stopped_abandons_its_step_and_the_next_one_goes_on(address: str, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    traces = tmp_path / "data" / "traces"
    options = '[engine]\ndtype = "float32"\n'

    def run(steps: int) -> Path:
        rest = {"milliseconds": 11, "model": str(REAL), "traces": str(traces), "extra": options}
        return write_run(tmp_path / "job", steps=steps, **rest)

    submit(address, run(ENDLESS), "first")
    assert eventually(lambda: (traces / "step-000000001").exists(), seconds=120), ray_job(address, "logs", "first")
    ray_job(address, "stop", "first")
    assert "STOPPED" in ray_job(address, "status", "first").upper()
    assert "stopped by SIGTERM: the step under way is abandoned" in ray_job(address, "logs", "first")
    committed = len(stored_ids(traces))
    assert 12 <= committed < 6 * ENDLESS
    assert committed % 6 == 0
    assert list((traces / "_staging").iterdir()) == []
    assert TraceDataset(traces).verify() == []
    Lease(traces, owner="whoever comes next").release()
    path = run(committed // 6 + 3)
    submit(address, path, "second")
    done = eventually(lambda: "SUCCEEDED" in ray_job(address, "status", "second").upper(), seconds=180)
    assert done, ray_job(address, "logs", "second")
    assert_complete(load_config(path))
