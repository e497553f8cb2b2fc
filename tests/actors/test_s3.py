"""Clients and pipelines whose dataset is in an object store: a real S3 server process on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from storage import TraceDataset
from storage.store import open_store
from tests.actors.test_pipeline import ENDLESS, driver, expected_ids, finish, write_run

pytestmark = pytest.mark.full
FAKE = ("-m", "tests.actors.fake_pipeline")


def assert_complete(url: str, steps: int) -> None:
    dataset = TraceDataset(url)
    assert dataset.steps == list(range(steps))
    ids = [trace.sample_id for trace in dataset]
    assert sorted(ids) == sorted(expected_ids(steps))
    assert dataset.verify() == []


def test_a_client_in_process(url: str) -> None:
    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=url) as client:
        params = SamplingParams(max_tokens=4, seed=0)
        first = client.sample(["1+1="], num_samples=3, sampling_params=params)
        with client.step(5):
            second = client.sample(["2+3="], num_samples=2, sampling_params=params)
        with pytest.raises(RuntimeError, match="stop"):
            with client.step(6):
                client.sample(["4+4="], sampling_params=params)
                raise RuntimeError("stop")
    dataset = TraceDataset(url)
    assert dataset.steps == [0, 5]
    assert {trace.sample_id: trace.completion_ids for trace in dataset} == {
        trace.sample_id: trace.completion_ids for trace in first + second
    }
    assert (dataset[first[0].sample_id].routed_experts == first[0].routed_experts).all()
    assert open_store(url).names("step-000000006") == []


@pytest.mark.parametrize("sinks", [1, 2])
def test_a_pipeline_that_is_killed_goes_on(url: str, tmp_path: Path, sinks: int) -> None:
    from tests.actors.waiting import eventually

    options = {"milliseconds": 60, "traces": url, "extra": f"num_sinks = {sinks}\n"}
    path = write_run(tmp_path, steps=ENDLESS, **options)
    store = open_store(url)
    with driver(*FAKE, str(path)) as process:
        assert eventually(lambda: "step-000000001" in store.committed(), seconds=90)
    assert len(store.committed()) < ENDLESS
    steps = len(store.committed()) + 2
    path = write_run(tmp_path, steps=steps, **options)
    with driver(*FAKE, str(path)) as process:
        finish(process)
    assert_complete(url, steps)


def test_of_two_pipelines_that_race_exactly_one_commits_each_step(url: str, tmp_path: Path) -> None:
    """There is no lease in an object store: whoever comes second to a step is told so by the conditional put."""
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    paths = [write_run(folder, steps=30, milliseconds=50, traces=url) for folder in folders]
    with driver(*FAKE, str(paths[0])) as one, driver(*FAKE, str(paths[1])) as other:
        outputs = [process.communicate(timeout=200)[0] for process in (one, other)]
        codes = [one.returncode, other.returncode]
    assert sorted(codes) == [0, 1], outputs
    assert "StepExistsError: step " in outputs[codes.index(1)]
    assert_complete(url, 30)
