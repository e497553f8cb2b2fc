"""RolloutClient.ray with the packaged model: the same calls, traces and datasets as in process, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import ray

import actors
from rollout.client import RolloutClient
from rollout.figures import ENGINE
from rollout.sampling import SamplingParams
from storage import TraceDataset
from storage.schema import from_table
from storage.trace import Trace
from tests.actors.endpoint import published, worker_of
from tests.actors.waiting import eventually

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "rollout" / "tiny_moe")
OPTIONS: dict[str, Any] = {"dtype": "float32", "batch_invariant": True, "max_running_requests": 8}
SAMPLING = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
PENALISED = SamplingParams(max_tokens=6, seed=3, repetition_penalty=1.5, logit_bias={4: 2.0}, bad_words=((4, 4),))
EXPLAINED = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=1, temperature=0.5)
PROMPTS = [list(range(3, 5 + i % 4)) for i in range(12)]

pytestmark = pytest.mark.usefixtures("cluster")


def ray_client(num_actors: int, **arguments: Any) -> RolloutClient:
    return RolloutClient.ray(MODEL, num_actors=num_actors, num_cpus=0.5, **OPTIONS, **arguments)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("over_ray") / "traces"


@pytest.fixture(scope="module")
def client(cluster: None, traces: Path) -> Iterator[RolloutClient]:
    """Two actors and one dataset for all tests; each uses steps of its own."""
    with ray_client(2, traces=traces) as client:
        yield client


def test_run_json_names_the_actors_and_all_options(client: RolloutClient, traces: Path) -> None:
    noted = json.loads((traces / "run.json").read_text())
    asked = {"num_actors": 2, "num_cpus": 0.5, "num_gpus": 0, "resources": None, "runtime_env": None, "num_sinks": 1}
    assert noted["actors"] == asked
    assert noted["engine"]["batch_invariant"] is True
    assert noted["engine"]["max_batch_tokens"] == 2048
    assert noted["model_fingerprint"] == client.info.fingerprint


def parity(trace: Trace) -> float:
    return float(sum(trace.completion_ids) % 2)


@pytest.fixture(scope="module")
def one_actor(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RolloutClient, Path]]:
    """One actor with rewards and its dataset; when it is closed it says so."""
    root = tmp_path_factory.mktemp("one_actor") / "traces"
    with ray_client(1, traces=root, reward_fn=parity) as client:
        yield client, root
    with pytest.raises(RuntimeError, match="closed"):
        client.sample(PROMPTS, sampling_params=SAMPLING)


def sample_ids(step: int, prompts: int, samples: int = 1, call: int = 0) -> list[str]:
    return [f"run/{step}/{call}-{i}/{j}" for i in range(prompts) for j in range(samples)]


def stored(traces: Path, step: int) -> list[str]:
    """The sample ids of a committed step, as DuckDB reads them."""
    files = f"{traces}/step-{step:09d}/*.parquet"
    return sorted(row[0] for row in duckdb.sql(f"select sample_id from '{files}'").fetchall())


def test_sample_returns_the_traces_in_prompt_order_behind_their_commit(client: RolloutClient, traces: Path) -> None:
    answers = client.sample(PROMPTS, num_samples=2, sampling_params=SAMPLING, step=0)
    assert [trace.sample_id for trace in answers] == sample_ids(0, 12, 2)
    assert [trace.prompt_ids for trace in answers[::2]] == PROMPTS
    assert stored(traces, 0) == sorted(sample_ids(0, 12, 2))


def test_stats_are_the_sum_of_the_actors_and_what_rays_endpoint_says(client: RolloutClient) -> None:
    before = client.stats()
    client.sample(PROMPTS, num_samples=2, sampling_params=SAMPLING, step=70)
    stats = client.stats()
    prompt_tokens = 2 * sum(len(prompt) for prompt in PROMPTS)
    assert stats["engines"] == 2
    assert stats["tokens_sampled_total"] - before["tokens_sampled_total"] == 24 * 6
    assert stats["tokens_computed_total"] - before["tokens_computed_total"] == prompt_tokens + 24 * 5
    assert stats["commits_total"] - before["commits_total"] == 1
    workers = [worker_of(slot.handle) for slot in client.backend._slots]  # type: ignore[attr-defined]
    summed = [figure.name for figure in ENGINE if figure.name not in ("weight_version", "kv_used_ratio")]
    expected = {name: pytest.approx(stats[name]) for name in summed if stats[name]}
    assert len(expected) > 8
    assert eventually(lambda: {name: published(*workers).get(name) for name in expected} == expected)
    sink = worker_of(client._parties.recorder._sinks[0])  # type: ignore[union-attr]
    assert eventually(lambda: published(sink).get("commits_total") == stats["commits_total"])
    commits = published(sink)
    assert commits["commit_latency_seconds_count"] == stats["commits_total"]
    assert 0 < commits["commit_seconds_total"] < stats["commit_seconds_total"]  # the client waits for the sink


def test_stream_commits_behind_its_last_trace(client: RolloutClient, traces: Path) -> None:
    stream = client.stream(PROMPTS[:4], sampling_params=SAMPLING, step=1)
    seen = [next(stream).sample_id]
    assert not (traces / "step-000000001").exists()
    seen += [trace.sample_id for trace in stream]
    assert sorted(seen) == stored(traces, 1) == sample_ids(1, 4)


def test_as_refs_yields_references_of_tables(client: RolloutClient, traces: Path) -> None:
    refs = list(client.stream(PROMPTS[:4], sampling_params=SAMPLING, step=2, as_refs=True))
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    tables = ray.get(refs)
    assert all(isinstance(table, pa.Table) for table in tables)
    ids = [trace.sample_id for table in tables for trace in from_table(table)]
    assert sorted(ids) == stored(traces, 2) == sample_ids(2, 4)
    by_rank = [actors.fetch(refs, dp_rank=rank, dp_size=2) for rank in range(2)]
    assert [trace.sample_id for part in by_rank for trace in part] == ids
    assert all(by_rank)


def test_a_step_gathers_its_calls_into_one_commit(client: RolloutClient, traces: Path) -> None:
    with client.step(3):
        client.sample(PROMPTS[:2], sampling_params=SAMPLING)
        assert not (traces / "step-000000003").exists()
        client.sample(PROMPTS[:3], sampling_params=SAMPLING)
    assert stored(traces, 3) == sample_ids(3, 2, call=0) + sample_ids(3, 3, call=1)


def test_sample_async_runs_two_calls_at_once(client: RolloutClient, traces: Path) -> None:
    async def both() -> list[list[Trace]]:
        calls = (client.sample_async(PROMPTS[:3], sampling_params=SAMPLING, step=step) for step in (4, 5))
        return await asyncio.gather(*calls)

    answers = asyncio.run(both())
    for step, answer in zip((4, 5), answers, strict=True):
        assert [trace.sample_id for trace in answer] == stored(traces, step) == sample_ids(step, 3)


def test_a_stream_left_early_commits_nothing_and_the_same_step_can_follow_at_once(
    one_actor: tuple[RolloutClient, Path],
) -> None:
    client, traces = one_actor
    long = SAMPLING.model_copy(update={"max_tokens": 40})
    for step in (6, 7, 8):
        stream = client.stream(PROMPTS * 2, sampling_params=long, step=step)
        next(stream)
        stream.close()
        assert not (traces / f"step-{step:09d}").exists()
        answers = client.sample(PROMPTS * 2, sampling_params=long, step=step)
        assert {(trace.finish_reason, len(trace.completion_ids)) for trace in answers} == {("length", 40)}
        assert stored(traces, step) == sorted(sample_ids(step, 24))


def test_a_killed_actor_costs_the_step_nothing(client: RolloutClient, traces: Path) -> None:
    slot = client.backend._slots[0]  # type: ignore[attr-defined]
    victim = slot.ready_handle()
    stream = client.stream(PROMPTS * 4, num_samples=2, sampling_params=SAMPLING, step=9)
    seen = [next(stream).sample_id]
    os.kill(ray.get(victim.health.remote())["pid"], signal.SIGKILL)
    seen += [trace.sample_id for trace in stream]
    assert slot.handle is not victim
    assert sorted(seen) == stored(traces, 9) == sorted(sample_ids(9, 48, 2))
    assert TraceDataset(traces).verify() == []


def sample_three_steps(client: RolloutClient) -> None:
    """With the checkpoint's weights, with new ones, and two calls in one step."""
    from transformers import AutoModelForCausalLM

    client.sample(PROMPTS, num_samples=2, sampling_params=SAMPLING, step=20)
    state = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").state_dict()
    client.update_weights({name: tensor * 0.9 for name, tensor in state.items()}, version=1)
    client.sample(PROMPTS, sampling_params=SAMPLING, step=21)
    with client.step(22):
        client.sample(PROMPTS[:3], sampling_params=SAMPLING)
        client.sample(PROMPTS[:3], sampling_params=SamplingParams(temperature=0, max_tokens=4, seed=1))
        client.sample(PROMPTS[:3], sampling_params=[PENALISED, EXPLAINED, SAMPLING])


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """What the same calls write in process, read back, by sample id."""
    root = tmp_path_factory.mktemp("in_process")
    with RolloutClient.local(MODEL, traces=root, reward_fn=parity, **OPTIONS) as local:
        sample_three_steps(local)
    return {trace.sample_id: trace for trace in TraceDataset(root)}


def test_one_actor_writes_the_dataset_of_one_process(
    one_actor: tuple[RolloutClient, Path], in_process: dict[str, Trace]
) -> None:
    """Equal in every field of every trace, rewards, weight versions and decoded text included."""
    client, root = one_actor
    sample_three_steps(client)
    over_ray = {t.sample_id: t for step in (20, 21, 22) for t in TraceDataset(root).iter(step)}
    assert over_ray == in_process
    assert len(over_ray) == 24 + 12 + 9
    assert {(trace.step, trace.weight_version) for trace in over_ray.values()} == {(20, 0), (21, 1), (22, 1)}
    assert {trace.reward for trace in over_ray.values()} == {0.0, 1.0}
    assert all(trace.reward == parity(trace) for trace in over_ray.values())


@pytest.mark.parametrize("replay", [False, True])
def test_scores_over_ray_are_what_was_sampled(client: RolloutClient, replay: bool) -> None:
    answers = client.sample(PROMPTS, sampling_params=SAMPLING)
    for trace, score in zip(answers, client.score(answers, replay=replay), strict=True):
        assert score.completion_logprobs.tobytes() == trace.raw_logprobs.tobytes()  # type: ignore[union-attr]
        assert score.routed_experts.tobytes() == trace.routed_experts.tobytes()  # type: ignore[union-attr]


def test_two_actors_write_the_step_of_one_process(
    client: RolloutClient, traces: Path, in_process: dict[str, Trace]
) -> None:
    """Equal in every field of every trace but `reward`: this client has no reward_fn."""
    client.sample(PROMPTS, num_samples=2, sampling_params=SAMPLING, step=20)
    over_ray = {trace.sample_id: trace for trace in TraceDataset(traces).iter(step=20)}
    assert over_ray == {i: replace(trace, reward=None) for i, trace in in_process.items() if trace.step == 20}
    assert len(over_ray) == 24
