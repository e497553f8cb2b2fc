"""The pipeline's command with the fake backend in its actors, as a program that a test can kill."""

from __future__ import annotations

import sys
from typing import Any

import actors
from actors.config import PipelineConfig, load_config
from actors.pipeline import run
from actors.pool import ActorPool
from rollout.client import RolloutClient
from tests.actors.fakes import FakeBackend


def fake_client(config: PipelineConfig, **fake_options: Any) -> RolloutClient:
    """What `actors.pipeline.ray_client` makes, with another backend."""
    pool = ActorPool(
        config.model,
        num_actors=config.actors.num_actors,
        num_cpus=config.actors.num_cpus,
        engine_options=fake_options,
        backend_factory=FakeBackend,
    )
    recorder = actors.open_recorder(config.traces, pool.info.spec, num_sinks=config.actors.num_sinks)
    return RolloutClient(pool, recorder, config.run)


if __name__ == "__main__":
    run(load_config(sys.argv[1]), fake_client)
