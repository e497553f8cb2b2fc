"""What SGLang's server alone does: retractions, as an error or as missing rows; and seeds that it may ignore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollout import RolloutClient, SamplingParams
from storage import TraceDataset
from tests.engines.fakes import FakeSglang

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


@pytest.fixture
def server(model: Path) -> Iterator[FakeSglang]:
    server = FakeSglang()
    server.model_path = str(model)
    yield server
    server.stop()


@pytest.fixture
def connect(server: FakeSglang, model: Path) -> Iterator[Callable[..., RolloutClient]]:
    with ExitStack() as stack:

        def make(**options: Any) -> RolloutClient:
            return stack.enter_context(RolloutClient.connect(server.url, backend="sglang", model=model, **options))

        yield make


def retracted(prompt: list[int], body: Any) -> Any:
    body["meta_info"]["num_retractions"] = int(prompt == [6, 7])
    return body


def test_a_retracted_sequence_is_an_error_of_its_own(connect, server):
    server.spoil = retracted
    good, bad = connect().sample([[5, 7, 9], [6, 7]], sampling_params=PARAMS)
    assert good.route_valid is None
    assert "run/0/0-1/0" in bad.error
    assert "connect with retractions='invalidate'" in bad.error


def test_or_its_rows_are_missing_in_the_dataset(connect, server, tmp_path):
    server.spoil = retracted
    client = connect(traces=tmp_path / "traces", retractions="invalidate")
    traces = client.sample([[5, 7, 9], [6, 7]], sampling_params=PARAMS)
    assert client.stats()["missing_route_rows_total"] == 2 + 4 - 1
    dataset = TraceDataset(tmp_path / "traces")
    assert dataset.verify() == []
    stored = dataset[traces[1].sample_id]
    assert stored.route_valid.tolist() == [False] * 5
    assert not stored.routed_experts.any()
    assert len(stored.completion_ids) == 4
    assert dataset[traces[0].sample_id].route_valid is None


@pytest.mark.parametrize("said", [False, None])
def test_seeds_are_refused_by_a_server_that_would_ignore_them_or_does_not_say(connect, server, said):
    server.facts = server.facts | {"enable_deterministic_inference": said}
    client = connect()
    with pytest.raises(ValueError, match=r"cannot do seed=3: it ignores seeds .*leave the seed out"):
        client.sample([[5, 7]], sampling_params=PARAMS)
    unseeded = PARAMS.model_copy(update={"seed": None})
    assert len({trace.seed for trace in client.sample([[5, 7]], sampling_params=unseeded)} - {None}) == 1


def test_what_else_retractions_could_mean_is_refused(connect):
    with pytest.raises(ValueError, match="retractions is 'drop', need 'refuse' or 'invalidate'"):
        connect(retractions="drop")
