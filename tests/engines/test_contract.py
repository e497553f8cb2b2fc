"""The same contract over our own engine, the served ones, and live vLLM where it is installed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout import RolloutClient, SamplingParams
from storage import TraceDataset, validate_trace
from tests.engines.conftest import ENGINES
from tests.engines.truth import OPTIONS, WIDER

PARAMS = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)


@pytest.fixture(params=["own", *ENGINES, pytest.param("live vllm", marks=pytest.mark.peer)])
def client(
    request: pytest.FixtureRequest, model: Path, checkpoint: Callable[..., Path], tmp_path: Path
) -> Iterator[RolloutClient]:
    traces = tmp_path / "traces"
    if request.param == "live vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed; see make_vllm_env.sh")
        wider = checkpoint("qwen3_moe", **WIDER)
        with RolloutClient.local(wider, backend="vllm", traces=traces, **OPTIONS) as client:
            yield client
        return
    if request.param == "own":
        with RolloutClient.local(model, dtype="float32", traces=traces) as client:
            yield client
        return
    fake, options = ENGINES[request.param]
    server = fake()
    backend = request.param.partition("-")[0]
    with RolloutClient.connect(server.url, backend=backend, model=model, traces=traces, **options) as client:
        yield client
    server.stop()


def test_traces_are_valid_named_seeded_and_committed(client, tmp_path):
    traces = client.sample([[5, 7, 9], [6, 7]], num_samples=2, sampling_params=PARAMS, prompt_keys=["a", "b"], step=4)
    assert [trace.sample_id for trace in traces] == ["run/4/a/0", "run/4/a/1", "run/4/b/0", "run/4/b/1"]
    assert [trace.group_id for trace in traces] == ["run/4/a", "run/4/a", "run/4/b", "run/4/b"]
    assert len({tuple(trace.completion_ids) for trace in traces}) == 4
    for trace in traces:
        validate_trace(trace, client.info.spec, trace.completion_ids)
        assert (trace.finish_reason, trace.seed, trace.weight_version) == ("length", 3, 0)
        assert trace.routed_experts.shape == (len(trace.token_ids) - 1, 2, 2)
    dataset = TraceDataset(tmp_path / "traces")
    assert dataset.verify() == []
    assert all(dataset[trace.sample_id] == trace for trace in traces)


def test_the_same_seed_and_step_draw_the_same_samples_and_routes_again(client):
    first, again = (
        client.sample([[5, 7, 9]], sampling_params=PARAMS, step=step, prompt_keys=["k"])[0] for step in (0, 1)
    )
    assert first.completion_ids != again.completion_ids
    requests = client._requests.check([[5, 7, 9]], 1, PARAMS, ["k"]).requests(0, 0)
    (finished,) = client.backend.stream(requests)
    assert finished.trace.completion_ids == first.completion_ids
    assert finished.trace.routed_experts.tolist() == first.routed_experts.tolist()


def test_rows_from_a_position_on_are_the_tail_of_all_rows(client, tmp_path):
    prompt = [5, 7, 9, 11, 13]
    whole, tail = (
        client.sample([prompt], sampling_params=PARAMS, step=step, prompt_keys=["k"], routed_experts_start_len=start)[0]
        for step, start in ((0, 0), (1, 3))
    )
    assert (tail.route_start, tail.route_len) == (3, len(tail.token_ids) - 1 - 3)
    assert whole.route_len == len(whole.token_ids) - 1
    (request,) = client._requests.check([prompt], 1, PARAMS, ["k"], routed_experts_start_len=3).requests(0, 0)
    (again,) = client.backend.stream([request])
    assert again.trace.completion_ids == whole.completion_ids
    assert again.trace.routed_experts.tolist() == whole.routed_experts[3:].tolist()
    assert TraceDataset(tmp_path / "traces").verify() == []


def test_a_stream_left_early_commits_nothing(client, tmp_path):
    stream = client.stream([[5 + i] for i in range(8)], sampling_params=PARAMS)
    next(stream)
    stream.close()
    assert len(TraceDataset(tmp_path / "traces")) == 0
    assert client.sample([[5, 7]], sampling_params=PARAMS)[0].finish_reason == "length"


def test_stats_count_what_was_sampled(client):
    before = client.stats()
    begun = time.perf_counter()
    traces = client.sample([[5, 7, 9], [6, 7]], num_samples=2, sampling_params=PARAMS)
    wall, after = time.perf_counter() - begun, client.stats()
    assert all(0 < trace.seconds < wall for trace in traces)
    counted = ("requests_ended_total", "tokens_sampled_total", "commits_total", "missing_route_rows_total")
    assert [after[name] - before[name] for name in counted] == [4, 4 * 6, 1, 0]
    assert (after["engines"], after["requests_running"], after["requests_waiting"]) == (1, 0, 0)
