"""What SGLang's server alone does: retractions, as an error or as missing rows; and seeds that it may ignore."""

from __future__ import annotations

from typing import Any

import pytest

from rollout import SamplingParams
from rollout.engine_reply import EngineDeadError
from storage import TraceDataset
from tests.engines.fakes import ADMIN

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


@pytest.fixture
def engine() -> str:
    return "sglang"


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


def test_temperatures_are_refused_by_a_server_whose_logprobs_ignore_them(connect, server):
    warm = PARAMS.model_copy(update={"temperature": 0.7})
    assert connect().sample([[5, 7]], sampling_params=warm)[0].error is None
    server.raw_logprobs = True
    client = connect()
    with pytest.raises(ValueError, match=r"cannot do temperature=0\.7: its logprobs are those before the temperature"):
        client.sample([[5, 7]], sampling_params=warm)
    assert client.sample([[5, 7]], sampling_params=PARAMS)[0].error is None


def test_admin_routes_get_the_admin_key_and_no_others_do(connect, server, model):
    server.key, server.admin_key = "k", "a"
    server.refuse_flush = True  # so that pause, flush and continue are asked as well
    client = connect(api_key="k", admin_api_key="a")
    client.update_weights(model, version=1)
    assert client.sample([[5, 7]], sampling_params=PARAMS)[0].weight_version == 1
    sent = {path: headers["Authorization"] for path, _, headers in server.seen}
    assert {path for path, key in sent.items() if key == "Bearer a"} == ADMIN - {"/abort_request"}
    assert sent["/generate"] == sent["/model_info"] == "Bearer k"


def test_without_the_admin_key_an_update_fails_before_anything_is_loaded(connect, server, model):
    server.key, server.admin_key = "k", "a"
    with pytest.raises(EngineDeadError, match="/update_weights_from_disk: 401: Unauthorized; pass the server's key"):
        connect(api_key="k").update_weights(model, version=1)
    assert server.loads == 0


def test_what_else_retractions_could_mean_is_refused(connect):
    with pytest.raises(ValueError, match="retractions is 'drop', need 'refuse' or 'invalidate'"):
        connect(retractions="drop")
