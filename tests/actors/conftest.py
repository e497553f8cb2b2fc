"""One small local Ray cluster for all actor tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=300_000_000,
        _system_config={"metrics_report_interval_ms": 1000},  # instead of 10 s
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Where fake backends note what they do, across processes."""
    folder = tmp_path / "journal"
    folder.mkdir()
    return folder
