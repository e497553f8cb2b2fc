"""RolloutClient: what is committed when, under which names, and what early ends leave behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import polars
import pytest

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH
from storage import StepExistsError, TraceDataset

PARAMS = SamplingParams(max_tokens=4, seed=0)
LONG = SamplingParams(max_tokens=100, seed=0, ignore_eos=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def client(root: Path) -> Iterator[RolloutClient]:
    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=root, max_running_requests=8) as client:
        yield client


def test_two_bare_calls_are_two_steps_that_duckdb_and_polars_read(client: RolloutClient, root: Path) -> None:
    client.sample(["1+2=", "30+4="], num_samples=2, sampling_params=PARAMS)
    client.sample(["5+5="], sampling_params=PARAMS)
    counts = duckdb.sql(f"select step, count(*) from '{root}/step-*/*.parquet' group by step order by step").fetchall()
    assert counts == [(0, 4), (1, 1)]
    ids = polars.read_parquet(f"{root}/step-*/*.parquet")["sample_id"].to_list()
    assert sorted(ids) == ["run/0/0-0/0", "run/0/0-0/1", "run/0/0-1/0", "run/0/0-1/1", "run/1/0-0/0"]


def test_what_is_returned_is_what_is_committed(client: RolloutClient, root: Path) -> None:
    traces = client.sample(["1+2=", "30+4="], num_samples=2, sampling_params=PARAMS, prompt_keys=["a", "b"])
    dataset = TraceDataset(root)
    assert [trace.sample_id for trace in traces] == ["run/0/a/0", "run/0/a/1", "run/0/b/0", "run/0/b/1"]
    assert all(dataset[trace.sample_id] == trace for trace in traces)


def test_calls_inside_a_step_are_one_commit(client: RolloutClient, root: Path) -> None:
    with client.step(7):
        client.sample(["1+2="], sampling_params=PARAMS)
        assert TraceDataset(root).steps == []
        client.sample(["3+4="], sampling_params=PARAMS)
    assert TraceDataset(root).steps == [7]
    assert {trace.sample_id for trace in TraceDataset(root).iter()} == {"run/7/0-0/0", "run/7/1-0/0"}


def test_a_step_left_by_an_exception_commits_nothing_and_can_be_repeated(client: RolloutClient, root: Path) -> None:
    with pytest.raises(KeyError), client.step(0):
        client.sample(["1+2="], sampling_params=PARAMS)
        raise KeyError("a user's error")
    assert len(TraceDataset(root)) == 0
    with client.step(0):
        client.sample(["1+2="], sampling_params=PARAMS)
    assert len(TraceDataset(root)) == 1


def test_a_stream_left_early_commits_nothing_and_gives_its_step_back(client: RolloutClient, root: Path) -> None:
    stream = client.stream(["1+2="] * 20, sampling_params=LONG, step=3)
    next(stream)
    stream.close()
    assert len(TraceDataset(root)) == 0
    assert len(client.sample(["1+2="], sampling_params=PARAMS, step=3)) == 1
    assert TraceDataset(root).steps == [3]
    assert TraceDataset(root).verify() == []


def test_a_stream_left_early_inside_a_step_spoils_the_step(client: RolloutClient, root: Path) -> None:
    with pytest.raises(RuntimeError, match="step 0: a call was left early or failed; nothing was committed"):
        with client.step(0):
            client.sample(["1+2="], sampling_params=PARAMS)
            stream = client.stream(["3+4="] * 20, sampling_params=LONG)
            next(stream)
            stream.close()
    assert len(TraceDataset(root)) == 0


def test_a_stream_that_nobody_reads_holds_no_step(client: RolloutClient) -> None:
    client.stream(["1+2="], sampling_params=PARAMS, step=0)
    assert client.sample(["1+2="], sampling_params=PARAMS)[0].step == 0


def test_a_committed_step_is_refused_before_anything_is_sampled(client: RolloutClient) -> None:
    client.sample(["1+2="], sampling_params=PARAMS, step=0)
    forwards = client.backend.stats.forwards
    with pytest.raises(StepExistsError, match="step 0 exists already; use step=1"):
        client.stream(["1+2="], sampling_params=PARAMS, step=0)
    assert client.backend.stats.forwards == forwards


def test_a_new_client_numbers_on_after_the_last_step(client: RolloutClient, root: Path) -> None:
    client.sample(["1+2="], sampling_params=PARAMS, step=4)
    client.close()
    with RolloutClient.local(MODEL_PATH, dtype="float32", traces=root) as second:
        assert second.sample(["1+2="], sampling_params=PARAMS)[0].step == 5


def test_closing_while_another_thread_samples_commits_nothing(client: RolloutClient, root: Path) -> None:
    errors: list[BaseException] = []
    started = threading.Event()

    def sample() -> None:
        try:
            for _ in client.stream(["1+2="] * 8 + ["3+4="] * 200, sampling_params=LONG):
                started.set()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=sample)
    thread.start()
    started.wait()
    client.close()
    thread.join(timeout=30)
    assert len(errors) == 1
    assert "closed" in str(errors[0])
    assert len(TraceDataset(root)) == 0


def test_coroutines_sample_side_by_side_and_are_steps_of_their_own(client: RolloutClient, root: Path) -> None:
    async def both() -> list[int]:
        calls = [client.sample_async([prompt], sampling_params=PARAMS) for prompt in ("1+2=", "3+4=", "5+6=")]
        return [traces[0].step for traces in await asyncio.gather(*calls)]

    assert sorted(asyncio.run(both())) == [0, 1, 2]
    assert len(TraceDataset(root)) == 3


def test_without_a_seed_each_call_draws_one_and_records_it(client: RolloutClient) -> None:
    first, second = (client.sample(["1+2="], num_samples=2, sampling_params=SamplingParams(max_tokens=4)) for _ in "ab")
    assert first[0].seed == first[1].seed == first[0].sampling_params["seed"]
    assert first[0].seed != second[0].seed


def test_the_same_seed_and_step_draw_the_same_samples_again(client: RolloutClient, root: Path) -> None:
    first = client.sample(["1+2="], num_samples=8, sampling_params=LONG)
    client.close()
    with RolloutClient.local(MODEL_PATH, dtype="float32", max_running_requests=8) as second:
        again = second.sample(["1+2="], num_samples=8, sampling_params=LONG)
    assert [trace.completion_ids for trace in first] == [trace.completion_ids for trace in again]
    assert len({tuple(trace.completion_ids) for trace in first}) == 8


def test_after_all_steps_were_dropped_the_next_one_is_sampled(tmp_path):
    with RolloutClient.local(MODEL_PATH, traces=tmp_path) as client:
        params = SamplingParams(max_tokens=2, temperature=0)
        client.sample(["1+2="], sampling_params=params, step=4)
        TraceDataset(tmp_path).keep_from(9)
        (trace,) = client.sample(["1+2="], sampling_params=params)
        assert trace.step == 9
        with pytest.raises(StepExistsError, match="step 8"):
            client.sample(["1+2="], sampling_params=params, step=8)
    assert TraceDataset(tmp_path).steps == [9]
