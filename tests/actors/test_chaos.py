"""Processes are killed at random moments, thirty times, while a pipeline runs and a reader looks on.

Afterwards every expected sample exists exactly once, every committed step verifies, and no reader saw a part of a step.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from actors.config import load_config
from storage import TraceDataset
from tests.actors.test_pipeline import ROOT, assert_complete, write_run
from tests.actors.waiting import eventually

STEPS, SAMPLES_PER_STEP = 700, 6
VICTIMS = ["generator"] * 14 + ["sink"] * 6 + ["driver"] * 6 + ["raylet"] * 4
STALLED = 60.0
"""Seconds without a new step, or in a driver's way to its end, that count as a hang."""


class Cluster:
    """A head node with the driver and the sink, and a second one that dies and comes back."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster

        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self._saved = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # the raylets', and through them the workers'
        self._ray = RayCluster(
            initialize_head=True,
            head_node_args={"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100_000_000},
        )
        self.address = self._ray.address
        self._second = self._add()

    def _add(self):
        return self._ray.add_node(num_cpus=1, object_store_memory=80_000_000)

    def workers(self, title: str) -> list[int]:
        """Pids of this cluster's worker processes whose title has `title` in it."""
        raylets = {_pid(node) for node in self._ray.list_all_nodes()}
        found = [(pid, *_status(pid)) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))]
        return [pid for pid, parent, name in found if parent in raylets and title in name]

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


def _status(pid: int) -> tuple[int, str]:
    """Parent and title of a process; (0, "") when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1]), Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0, ""


class Reader(threading.Thread):
    """Opens the dataset again and again, and notes each step that had not all of its samples."""

    def __init__(self, traces: Path) -> None:
        super().__init__()
        self._traces = traces
        self._stop_reading = threading.Event()
        self.looks = 0
        self.partial: list[tuple[int, int]] = []

    def run(self) -> None:
        while not self._stop_reading.wait(0.05):
            if not (self._traces / "_dataset.json").exists():
                continue
            dataset = TraceDataset(self._traces)
            for step in dataset.steps[-3:]:
                count = sum(1 for _ in dataset.iter(step=step))
                self.looks += 1
                if count != SAMPLES_PER_STEP:
                    self.partial.append((step, count))

    def stop(self) -> None:
        self._stop_reading.set()
        self.join()


class Driver:
    """The pipeline's process; started again whenever it has ended before the last step."""

    def __init__(self, config: Path, address: str, log: Path) -> None:
        self._command = [sys.executable, "-m", "tests.actors.fake_pipeline", str(config)]
        self._environment = {**os.environ, "RAY_ADDRESS": address}
        self._log = log
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


def committed(traces: Path) -> int:
    return len(list(traces.glob("step-*")))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def strike(victim: str, cluster: Cluster, driver: Driver, rng: random.Random) -> bool:
    """Kill one; False when there is none of the kind at this moment."""
    if victim == "driver":
        driver.kill()
        return True
    if victim == "raylet":
        cluster.kill_second_node()
        return True
    pids = cluster.workers("Generator" if victim == "generator" else "Sink")
    if not pids:
        return False
    os.kill(rng.choice(pids), signal.SIGKILL)
    return True


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_thirty_kills_lose_nothing_double_nothing_and_show_no_part_of_a_step(cluster: Cluster, tmp_path: Path) -> None:
    rng = random.Random(0)
    victims = rng.sample(VICTIMS, len(VICTIMS))
    config = write_run(tmp_path, steps=STEPS, milliseconds=15, num_actors=2)
    traces = tmp_path / "traces"
    driver, reader = Driver(config, cluster.address, tmp_path / "driver.log"), Reader(traces)
    reader.start()
    kills: list[str] = []
    try:
        for victim in victims:
            next_step = partial(_goes_on, driver, traces, committed(traces))
            assert eventually(next_step, seconds=STALLED), _tail(tmp_path, kills)
            time.sleep(rng.uniform(0, 0.6))
            if strike(victim, cluster, driver, rng):
                kills.append(victim)
        assert eventually(lambda: _goes_on(driver, traces, STEPS - 1), seconds=4 * STALLED), _tail(tmp_path, kills)
        assert eventually(lambda: driver.finished, seconds=STALLED), _tail(tmp_path, kills)
    finally:
        driver.kill()
        reader.stop()
    assert len(kills) >= 30 - 2, kills
    assert reader.looks > 100
    assert reader.partial == []
    assert_complete(load_config(config))


def _goes_on(driver: Driver, traces: Path, before: int) -> bool:
    """Whether a further step was committed; a driver that ended is started again."""
    if driver.process.poll() is not None and not driver.finished:
        driver.start()
    return committed(traces) > before


def _tail(folder: Path, kills: list[str]) -> str:
    return f"after {kills}:\n{(folder / 'driver.log').read_text()[-3000:]}"
