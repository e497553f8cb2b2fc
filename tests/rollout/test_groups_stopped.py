"""Groups with a rank that is stopped while nothing is under way: whoever asks next notices in time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout import RolloutClient, SamplingParams
from rollout.backend import SampleRequest
from tests.families import save_tiny
from tests.rollout.test_rank_link import SOCKET_BUFFER

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
TIMEOUT = 5
START = 120  # seconds that a start may take on a busy machine
PROMPT = tuple(range(3, 123)) * 2  # 240 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen3_moe", tmp_path_factory.mktemp("stopped") / "qwen3_moe")


@pytest.fixture
def client(model: Path) -> Iterator[RolloutClient]:
    """Two ranks that rest."""
    options = {"dtype": "float32", "max_running_requests": 64, "collective_timeout_s": TIMEOUT}
    with RolloutClient.local(model, dp_size=2, **options) as client:
        client.sample([[5, 9]], sampling_params=SamplingParams(max_tokens=2, seed=0))
        yield client


def stop(client: RolloutClient, *ranks: int) -> None:
    for rank in ranks:
        os.kill(client.backend.ranks.links[rank].process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]


def within(seconds: float, call: Callable[[], object]) -> float:
    """Seconds that a call took; it has to return in time."""
    begun = time.monotonic()
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()
    return time.monotonic() - begun


def test_more_requests_than_its_socket_takes_reach_the_ranks_that_follow(client: RolloutClient) -> None:
    stop(client, 1)
    params = SamplingParams(max_tokens=1, seed=0)
    requests = [SampleRequest(f"run/0/{i}-0/0", 0, PROMPT, params, {"note": f"{i:2048}"}) for i in range(256)]
    assert len(requests) * 2048 > 2 * SOCKET_BUFFER  # half of them are the stopped rank's
    found: list[str] = []

    def sample() -> None:
        for finished in client.backend.stream(requests):
            found.extend(trace.sample_id for trace in finished.traces())

    within(TIMEOUT + START + 60, sample)
    assert sorted(found) == sorted(request.sample_id for request in requests)


@pytest.mark.parametrize("stopped", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_figures_come_from_the_ranks_that_follow(client: RolloutClient, stopped: tuple[int, ...]) -> None:
    first = client.backend.ranks  # type: ignore[attr-defined]
    stop(client, *stopped)
    found: dict[str, float] = {}
    within(TIMEOUT + START, lambda: found.update(client.stats()))
    assert (found["engines"], found["requests_ended_total"]) == (1, 0)  # new ranks have counted nothing yet
    assert "did not answer 'figures' within 5 s" in str(first.reason)


@pytest.mark.parametrize("stopped", [(1,), (0, 1)], ids=["one rank", "all ranks"])
def test_closing_ends_all_ranks_in_time(client: RolloutClient, stopped: tuple[int, ...]) -> None:
    processes = [link.process for link in client.backend.ranks.links]  # type: ignore[attr-defined]
    stop(client, *stopped)
    assert within(2 * TIMEOUT + 30, client.close) < 2 * TIMEOUT + 10
    assert None not in [process.poll() for process in processes]


def test_the_watchdog_can_follow_a_group(client: RolloutClient) -> None:
    backend = client.backend

    def moved(before: int | None) -> int | None:
        for _ in range(600):
            if (now := backend.progress) != before:  # type: ignore[attr-defined]
                return now
            time.sleep(0.05)
        return before

    moved(None)
    still = moved(moved(0))
    client.sample([[5, 9]] * 4, sampling_params=SamplingParams(max_tokens=8, seed=0))
    assert (after := moved(still)) is not None
    assert still is not None
    assert after > still
