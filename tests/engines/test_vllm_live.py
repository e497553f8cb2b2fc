"""Live vLLM 0.30 on the CPU, in process and over HTTP, against transformers in float32. See make_vllm_env.sh."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from rollout import RolloutClient, RouterReplay, SamplingParams
from rollout.vllm_in_process import VllmInProcess
from storage import ReplayBatch, Trace, TraceDataset
from tests.engines.truth import OPTIONS, PROMPTS, WIDER, check, load
from tests.engines.vllm_server import KEY, VllmServer

pytest.importorskip("vllm", reason="vLLM is not installed; see make_vllm_env.sh")
pytestmark = pytest.mark.peer
FAMILIES = ("qwen3_moe", "olmoe", "mixtral")
REACHED = ("in_process", "generate", "completions")


@pytest.fixture(scope="module", params=[(family, reached) for family in FAMILIES for reached in REACHED], ids="-".join)
def deployment(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A family, in process or through one of the two endpoints of a server."""
    return request.param


@pytest.fixture(scope="module")
def model(deployment: tuple[str, str], checkpoint: Callable[..., Path]) -> Path:
    """With sampling defaults of its own, which a server takes for what a request leaves out."""
    path = checkpoint(deployment[0], **WIDER)
    defaults = GenerationConfig.from_pretrained(path)
    defaults.update(do_sample=True, top_k=3, top_p=0.5, repetition_penalty=1.5)
    defaults.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reached(deployment: tuple[str, str]) -> str:
    return deployment[1]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], VllmServer]]:
    """The server of a model; one at a time, kept while the model stays the same."""
    options = {name: value for name, value in OPTIONS.items() if name != "enforce_eager"}
    running: dict[Path, VllmServer] = {}

    def of(model: Path) -> VllmServer:
        if model not in running:
            for path in list(running):
                running.pop(path).kill()
            running[model] = VllmServer(model, tmp_path_factory.mktemp("server") / "log", **options)
        return running[model]

    yield of
    for server in running.values():
        server.kill()


@pytest.fixture(scope="module")
def client(
    reached: str, model: Path, serve: Callable[[Path], VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutClient]:
    traces = tmp_path_factory.mktemp("traces") / "traces"
    if reached == "in_process":
        opened = RolloutClient.local(model, backend="vllm", traces=traces, **OPTIONS)
    else:
        ends = {"api": reached, "api_key": KEY}
        opened = RolloutClient.connect(serve(model).url, backend="vllm", model=model, traces=traces, **ends)
    with opened as client:
        client.root = traces
        yield client


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.9), (0.7, 1.0)])
def test_routes_and_logprobs_are_those_of_transformers(client, model, temperature, top_p):
    params = SamplingParams(max_tokens=24, seed=1, temperature=temperature, top_p=top_p, ignore_eos=True)
    traces = client.sample(PROMPTS, num_samples=2, sampling_params=params)
    assert all(trace.error is None for trace in traces)
    assert len({tuple(trace.completion_ids) for trace in traces}) == 8
    check(traces, load(model), top_p, temperature)
    assert TraceDataset(client.root).verify() == []


def aborted_one_by_one(client, step: int, pause: float) -> list:
    """The traces with tokens of 16 requests that are aborted one after the other."""
    params = SamplingParams(max_tokens=190, seed=1, ignore_eos=True)
    requests = client._requests.check([PROMPTS[1]] * 16, 1, params).requests(step, 0)
    stream = client.backend.stream(requests)
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(stream))
    thread.start()
    while len(client.backend._running) < 16:
        thread.join(0.01)
    for request in requests:
        thread.join(pause)
        client.backend.end([request])
    thread.join(60)
    assert {item.trace.finish_reason for item in found} <= {"abort", "length"}
    return [item.trace for item in found if item.trace.completion_ids]


def test_an_aborted_request_keeps_its_rows(client, model):
    """Some must have begun and not ended: how long that takes depends on the machine and on what else it does."""
    for step, pause in enumerate((0.05, 0.1, 0.02, 0.2, 0.4)):
        begun = aborted_one_by_one(client, step, pause)
        if "abort" in [trace.finish_reason for trace in begun]:
            break
    assert "abort" in [trace.finish_reason for trace in begun]
    check(begun, load(model))


def test_rows_from_a_position_on_are_the_tail_of_all_rows(client, model):
    params = SamplingParams(max_tokens=8, seed=6, ignore_eos=True)
    requests = [
        client._requests.check([PROMPTS[2]], 1, params, ["k"], routed_experts_start_len=start).requests(0, 0)
        for start in (0, 10)
    ]
    whole, tail = (next(client.backend.stream(request)).trace for request in requests)
    check([whole], load(model))
    assert tail.completion_ids == whole.completion_ids
    assert tail.route_start == 10
    assert np.array_equal(tail.routed_experts, whole.routed_experts[10:])


def test_its_trace_replays_as_one_of_our_own_engine_with_the_same_ids(client, model):
    """The other trace's routes are those that our own engine takes for the same tokens.

    OLMoE's come in another order from vLLM on a CPU, and the sum over a token's experts rounds by their order: close as
    they came, the same bits once both are in one order.
    """
    (trace,) = client.sample([PROMPTS[2]], sampling_params=SamplingParams(max_tokens=8, seed=2, ignore_eos=True))
    plain, spec = load(model), client.info.spec
    with RolloutClient.local(model, dtype="float32") as engine:
        (score,) = engine.score([trace.token_ids])
    own = Trace(
        sample_id="own/0/0/0",
        step=0,
        prompt_ids=trace.prompt_ids,
        completion_ids=trace.completion_ids,
        logprobs=trace.logprobs,
        routed_experts=score.routed_experts,
        finish_reason="length",
    )

    def logits(one: Trace, order: Callable[[np.ndarray], np.ndarray] = np.asarray) -> torch.Tensor:
        batch = ReplayBatch.collate([replace(one, routed_experts=order(one.routed_experts))], spec=spec)
        with torch.no_grad(), RouterReplay(plain)(batch):
            return plain(**batch.model_inputs()).logits

    if plain.config.model_type == "olmoe":
        torch.testing.assert_close(logits(trace), logits(own), rtol=0, atol=1e-5)
        assert torch.equal(logits(trace, np.sort), logits(own, np.sort))
    else:
        assert torch.equal(logits(trace), logits(own))


def test_prompts_computed_in_parts_give_the_same_samples_as_alone(client, model):
    """A step computes 64 tokens, so these prompts are cut at several places when they come together."""
    params = SamplingParams(max_tokens=12, seed=4, temperature=0.7, ignore_eos=True)
    requests = client._requests.check(PROMPTS[2:] * 4, 1, params).requests(0, 0)
    alone = [item.trace for request in requests for item in client.backend.stream([request])]
    together = {item.trace.sample_id: item.trace for item in client.backend.stream(requests)}
    assert [trace.error for trace in together.values()] == [None] * 8
    assert [together[trace.sample_id].completion_ids for trace in alone] == [trace.completion_ids for trace in alone]
    check([*together.values()], load(model), temperature=0.7)


def test_an_end_token_stops_without_a_tokenizer(client):
    params = SamplingParams(max_tokens=150, seed=5)
    traces = client.sample([PROMPTS[1]] * 8, sampling_params=params)
    stopped = [trace for trace in traces if trace.finish_reason == "stop"]
    assert stopped
    assert all(trace.completion_ids[-1] == 2 and trace.stop_reason is None for trace in stopped)


def test_updates_pass_the_canary_and_leave_no_prefix_of_the_old_weights(client, model, reached, tmp_path):
    """Last in this file: it changes the weights. A state dict first, in process, then directories.

    Every prompt is sampled twice with each: the second time prefixes come from the cache, with their routes.
    """
    cached = cached_tokens(client)
    torch.manual_seed(1)
    other = load(model)
    for parameter in other.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    params = SamplingParams(max_tokens=16, seed=1, ignore_eos=True)
    for _ in range(2):
        check(client.sample(PROMPTS, sampling_params=params), load(model))
    assert (hits := cached()) > 0
    first = other.state_dict() if reached == "in_process" else tmp_path / "other"
    version = client.backend.weight_version
    for source, plain in ((first, other), (model, load(model)), (tmp_path / "other", other), (model, load(model))):
        version += 1
        client.update_weights(source, version=version)
        for _ in range(2):
            traces = client.sample(PROMPTS, sampling_params=params)
            check(traces, plain)
            assert {trace.weight_version for trace in traces} == {version}
        assert cached() > hits
        hits = cached()


def cached_tokens(client: RolloutClient) -> Callable[[], float]:
    """Prompt tokens that were not computed again, so far."""
    adapter = client.backend._adapter
    if not isinstance(adapter, VllmInProcess):
        line = re.compile(r"^vllm:prefix_cache_hits_total\S* (\S+)$", re.MULTILINE)
        url = f"{adapter._http.url}/metrics"
        return lambda: float(line.search(urllib.request.urlopen(url).read().decode())[1])
    counts: list[int] = []
    finish = adapter._finish
    adapter._finish = lambda output: (counts.append(output.num_cached_tokens), finish(output))
    return lambda: sum(counts)
