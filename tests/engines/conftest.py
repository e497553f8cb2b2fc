"""One small checkpoint, fake servers of both engines, and clients on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutClient
from tests.engines.fakes import FakeServer, FakeSglang, FakeVllm

ENGINES = {"sglang": (FakeSglang, {}), "vllm": (FakeVllm, {}), "vllm-completions": (FakeVllm, {"api": "completions"})}


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    """Qwen3-MoE with 2 layers, 8 experts, top 2, 96 token ids."""
    return checkpoint("qwen3_moe")


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def server(engine: str, model: Path) -> Iterator[FakeServer]:
    server = ENGINES[engine][0]()
    server.model_path = str(model)
    yield server
    server.stop()


@pytest.fixture
def connect(engine: str, server: FakeServer, model: Path) -> Iterator[Callable[..., RolloutClient]]:
    """`connect(traces=...)`: a client on the fake server, closed at the end."""
    with ExitStack() as stack:

        def make(**options: Any) -> RolloutClient:
            options = {"model": model, "backend": engine.partition("-")[0], **ENGINES[engine][1], **options}
            return stack.enter_context(RolloutClient.connect(server.url, **options))

        yield make
