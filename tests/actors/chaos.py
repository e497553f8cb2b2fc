"""What the tests need that kill processes at random: a cluster of two nodes, the pipeline's process, a reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from storage import TraceDataset
from tests.actors.test_pipeline import ROOT
from tests.actors.waiting import eventually

SAMPLES_PER_STEP = 6
STALLED = 60.0
"""Seconds without a new step, or in a driver's way to its end, that count as a hang."""


class Cluster:
    """A head node with the driver and the sinks, and a second one that dies and comes back.

    Each has room for two generators of half a CPU, so the third one runs on the second node.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self._saved = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # the raylets', and through them the workers'
        self._ray = RayCluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000},
        )
        self.address = self._ray.address
        self._second = self._add()

    def _add(self):
        return self._ray.add_node(num_cpus=1, object_store_memory=80_000_000)

    def workers(self, title: str) -> list[int]:
        """Pids of this cluster's worker processes whose title has `title` in it."""
        return _children({_pid(node) for node in self._ray.list_all_nodes()}, title)

    def on_second_node(self, title: str) -> list[int]:
        """The same, of the second node alone: the parent of each is that node's raylet."""
        return _children({_pid(self._second)}, title)

    def kill_second_node(self) -> None:
        os.kill(_pid(self._second), signal.SIGKILL)
        self._ray.remove_node(self._second, allow_graceful=False)
        self._second = self._add()

    def close(self) -> None:
        self._ray.shutdown()
        for name, value in self._saved.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def _pid(node) -> int:
    return node.all_processes["raylet"][0].process.pid


def _children(parents: set[int], title: str) -> list[int]:
    found = [(pid, *_status(pid)) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))]
    return [pid for pid, parent, name in found if parent in parents and title in name]


def _status(pid: int) -> tuple[int, str]:
    """Parent and title of a process; (0, "") when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1]), Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0, ""


class Reader(threading.Thread):
    """Opens the dataset again and again, and notes each step that had not all of its samples, and each error."""

    def __init__(self, traces: Path) -> None:
        super().__init__()
        self._traces = traces
        self._stop_reading = threading.Event()
        self.looks = 0
        self.partial: list[tuple[int, int]] = []
        self.errors: list[str] = []

    def run(self) -> None:
        while not self._stop_reading.wait(0.05):
            try:
                self._look()
            except Exception:
                self.errors.append(traceback.format_exc())

    def _look(self) -> None:
        if not (self._traces / "_dataset.json").exists():
            return
        dataset = TraceDataset(self._traces)
        for step in dataset.steps[-3:]:
            count = sum(1 for _ in dataset.iter(step=step))
            self.looks += 1
            if count != SAMPLES_PER_STEP:
                self.partial.append((step, count))

    def stop(self) -> None:
        self._stop_reading.set()
        self.join()

    def assert_saw_whole_steps(self, looks: int) -> None:
        """To be called while it reads: it does so still, met no error, and looked more than `looks` times."""
        assert self.is_alive()
        assert self.errors == []
        assert self.partial == []
        assert self.looks > looks


class Driver:
    """The pipeline's process; started again whenever it has ended before the last step."""

    def __init__(self, config: Path, address: str, log: Path) -> None:
        self._command = [sys.executable, "-m", "tests.actors.fake_pipeline", str(config)]
        self._environment = {**os.environ, "RAY_ADDRESS": address}
        self._log, self._traces = log, config.parent / "traces"
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def finished(self) -> bool:
        return self.process.poll() == 0

    def committed(self) -> int:
        return len(list(self._traces.glob("step-*")))

    def await_step(self, after: int, seconds: float = STALLED) -> None:
        """Wait until more than `after` steps are committed; a driver that ended is started again."""

        def more() -> bool:
            if self.process.poll() is not None and not self.finished:
                self.start()
            return self.committed() > after

        assert eventually(more, seconds=seconds), self._log.read_text()[-3000:]

    def await_end(self, steps: int) -> None:
        """Wait until all steps are committed and the process has ended well."""
        self.await_step(steps - 1, seconds=4 * STALLED)
        assert eventually(lambda: self.finished, seconds=STALLED), self._log.read_text()[-3000:]
