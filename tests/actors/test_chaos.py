"""Processes are killed at random moments, thirty times, while a pipeline runs and a reader looks on.

Afterwards every expected sample exists exactly once, every committed step verifies, and no reader saw a part of a step.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.config import load_config
from storage import TraceDataset
from tests.actors.chaos import Cluster, Driver, Reader
from tests.actors.test_pipeline import ENDLESS, assert_complete, write_run

ACTORS = 3  # two fit on the head node
VICTIMS = ["generator"] * 14 + ["sink"] * 6 + ["driver"] * 6 + ["raylet"] * 4
LAST_STEPS = 20
"""How many more steps the run does when all processes were killed."""
STRIKE_SECONDS = 60.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def strike(victim: str, cluster: Cluster, driver: Driver, traces: Path, rng: random.Random) -> bool:
    """Kill one; False when there is none of the kind at this moment."""
    if victim == "driver":
        alive = driver.process.poll() is None
        driver.kill()
        return alive
    if victim == "raylet":
        working = bool(samplers(traces) & set(cluster.on_second_node("Generator")))
        if working:
            cluster.kill_second_node()
        return working
    pids = cluster.workers("Generator" if victim == "generator" else "Sink")
    if not pids:
        return False
    os.kill(rng.choice(pids), signal.SIGKILL)
    return True


def samplers(traces: Path) -> set[int]:
    """Pids of the generators that sampled the last step."""
    dataset = TraceDataset(traces)
    return {trace.metadata["pid"] for trace in dataset.iter(step=dataset.steps[-1])}


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_thirty_kills_lose_nothing_double_nothing_and_show_no_part_of_a_step(cluster: Cluster, tmp_path: Path) -> None:
    rng = random.Random(0)
    config = write_run(tmp_path, steps=ENDLESS, milliseconds=15, num_actors=ACTORS)
    traces = tmp_path / "traces"
    driver, reader = Driver(config, cluster.address, tmp_path / "driver.log"), Reader(traces)
    reader.start()
    kills: Counter[str] = Counter()
    try:
        for victim in rng.sample(VICTIMS, len(VICTIMS)):
            driver.await_step(after=driver.committed())
            time.sleep(rng.uniform(0, 0.6))
            end = time.monotonic() + STRIKE_SECONDS
            while not strike(victim, cluster, driver, traces, rng):
                assert time.monotonic() < end, f"no {victim} to kill after {kills}"
                driver.await_step(after=driver.committed())
            kills[victim] += 1
        driver.await_step(after=driver.committed())
        driver.kill()
        steps = driver.committed() + LAST_STEPS
        write_run(tmp_path, steps=steps, milliseconds=15, num_actors=ACTORS)
        driver.start()
        driver.await_end(steps)
        reader.assert_saw_whole_steps(looks=100)
    finally:
        driver.kill()
        reader.stop()
    assert kills == {"generator": 14, "sink": 6, "driver": 6, "raylet": 4}
    assert_complete(load_config(config))
