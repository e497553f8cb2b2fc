"""Weight updates: every source, all of it or nothing, and what becomes of requests that run. Sleep and wake."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.checkpoint_names import CheckpointNames
from rollout.weight_transfer import buckets
from storage import ReplayBatch, TraceDataset
from storage.trace import WeightSpan
from tests.rollout.oracle import Oracle, check_greedy
from tests.rollout.spans import check_kept_spans, check_recomputed
from tests.rollout.test_experts import needs_bfloat16

PROMPTS = [[5, 7, 11], [3] * 9, [20, 21, 22, 23, 24]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, seed=0)
LONG = SamplingParams(max_tokens=120, ignore_eos=True, seed=3)


@pytest.fixture(scope="module")
def old(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def new(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the same shape, as transformers saves it: one tensor per expert."""
    path = tmp_path_factory.mktemp("new")
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


@pytest.fixture
def client(old: Path) -> Iterator[RolloutClient]:
    with RolloutClient.local(old, dtype="float32", max_running_requests=4, batch_invariant=True) as client:
        yield client


@pytest.fixture(scope="module")
def shared(old: Path) -> Iterator[RolloutClient]:
    """For tests that leave the weights as they were."""
    with RolloutClient.local(old, dtype="float32", max_running_requests=4, batch_invariant=True) as client:
        yield client


def own_names(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def as_saved(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def reused_buffer(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """An iterator that overwrites each tensor once the next one is asked for."""
    for name, tensor in as_saved(path).items():
        buffer = tensor.clone()
        yield name, buffer
        buffer.fill_(torch.nan)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "state dict": own_names,
    "state dict as saved": as_saved,
    "directory": lambda path: path,
    "directory by name": str,
    "iterator": reused_buffer,
    "buckets": lambda path: (dict(bucket.items()) for bucket in buckets(as_saved(path).items(), limit_bytes=5000)),
    "bfloat16": lambda path: {name: tensor.bfloat16().float() for name, tensor in own_names(path).items()},
}


@pytest.mark.parametrize("source", [name for name in SOURCES if name != "bfloat16"])
def test_after_an_update_the_engine_samples_as_transformers_does_with_these_weights(
    source: str, client: RolloutClient, new: Path
) -> None:
    client.update_weights(SOURCES[source](new), version=4)
    traces = client.sample(PROMPTS, sampling_params=GREEDY)
    check_greedy(Oracle(new), traces)
    assert {tuple(trace.weight_versions) for trace in traces} == {((4, 0, t.num_rows),) for t in traces}


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "behind a sleep"])
@needs_bfloat16
def test_packed_experts_are_those_of_the_new_weights(sleeps: bool, old: Path, new: Path) -> None:
    prompts = [[(7 * i + j) % 90 + 3 for j in range(40)] for i in range(4)]
    with RolloutClient.local(old, dtype="bfloat16") as client:
        before = client.sample(prompts, sampling_params=GREEDY)
        experts = client.backend._built.runner.model.model.layers[0].mlp.experts  # type: ignore[attr-defined]
        assert all(packed._packed for packed in experts.packed_weights.values())
        if sleeps:
            client.sleep(level=2)
            assert not any(packed._packed for packed in experts.packed_weights.values())
            client.wake(new, version=1)
        else:
            client.update_weights(new, version=1)
        after = client.sample(prompts, sampling_params=GREEDY)
    with RolloutClient.local(new, dtype="bfloat16", pack_weights=False) as client:
        expected = client.sample(prompts, sampling_params=GREEDY)
    assert [t.completion_ids for t in after] != [t.completion_ids for t in before]
    assert [t.completion_ids for t in after] == [t.completion_ids for t in expected]
    for mine, fresh in zip(after, expected, strict=True):
        np.testing.assert_array_equal(mine.logprobs, fresh.logprobs)


def test_tied_weights_may_be_left_out(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("qwen3_moe", tie_word_embeddings=True)
    state = own_names(path)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"] or torch.equal(
        state["lm_head.weight"], state["model.embed_tokens.weight"]
    )
    del state["lm_head.weight"]
    with RolloutClient.local(path, dtype="float32") as client:
        client.update_weights({name: 1.1 * tensor for name, tensor in state.items()}, version=1)
        served = client.backend._built.runner.model  # type: ignore[attr-defined]
        assert torch.equal(served.lm_head.weight, 1.1 * state["model.embed_tokens.weight"])
        assert served.lm_head.weight is served.model.embed_tokens.weight


def test_names_as_saved_are_those_of_the_files_and_lead_back_to_the_model(new: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32)
    names, files = CheckpointNames(model), as_saved(new)
    assert {name: tensor.shape for name, tensor in names.saved.items()} == {n: t.shape for n, t in files.items()}
    back = dict(names.convert(dict(reversed(files.items()))))
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.state_dict().items())


def with_nan(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**state, "model.norm.weight": torch.full_like(state["model.norm.weight"], torch.nan)}


def without_one_expert(state: dict[str, torch.Tensor], path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in as_saved(path).items() if "layers.1.mlp.experts.3.up" not in name}


def fails_half_way(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(as_saved(path).items())[:20]
    raise OSError("the trainer went away")


def twice(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from as_saved(path).items()
    yield from as_saved(path).items()


BAD: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "an unknown name": (lambda p: {**own_names(p), "x": torch.ones(1)}, ValueError, r"unknown \['x'\]; nothing was"),
    "an expert missing": (
        lambda p: without_one_expert({}, p),
        ValueError,
        r"missing \['model.layers.1.mlp.experts.3.up_proj.weight'\]; nothing was changed",
    ),
    "a wrong shape": (
        lambda p: {**own_names(p), "model.norm.weight": torch.ones(3)},
        ValueError,
        r"'model.norm.weight' is torch.float32 \(3,\) .*, need dense floating point \(32,\)",
    ),
    "integers": (
        lambda p: {**own_names(p), "model.norm.weight": torch.ones(32, dtype=torch.int64)},
        ValueError,
        "'model.norm.weight' is torch.int64",
    ),
    "NaN": (lambda p: with_nan(own_names(p)), ValueError, "'model.norm.weight' holds 32 values that are not finite"),
    "a name twice": (twice, ValueError, "comes twice; nothing was changed"),
    "a source that fails": (fails_half_way, OSError, "the trainer went away"),
    "half a checkpoint": (lambda p: iter(list(as_saved(p).items())[:20]), ValueError, "missing .*nothing was changed"),
    "no directory": (lambda p: p / "step-7", FileNotFoundError, "it is no directory; nothing was changed"),
    "a directory without weights": (lambda p: p.parent, FileNotFoundError, r"holds no \*.safetensors files"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_whole_and_the_old_weights_serve(
    case: str, shared: RolloutClient, new: Path
) -> None:
    make, error, message = BAD[case]
    before = shared.sample(PROMPTS, sampling_params=GREEDY, step=0)
    with pytest.raises(error, match=message):
        shared.update_weights(make(new), version=1, check_finite=True)
    assert shared.sample(PROMPTS, sampling_params=GREEDY, step=0) == before


def test_a_version_must_rise_unless_forced(client: RolloutClient, new: Path) -> None:
    client.update_weights(new, version=5)
    for version in (5, 4):
        with pytest.raises(ValueError, match=f"weight version {version} is not above the current 5; force=True"):
            client.update_weights(new, version=version)
    client.update_weights(new, version=2, force=True)
    assert client.sample(PROMPTS, sampling_params=GREEDY)[0].weight_version == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_flight": "finish"}, "in_flight is 'finish', need 'wait', 'abort' or 'keep'"),
        ({"kv": "drop"}, "kv is 'drop', need 'keep' or 'recompute'"),
        ({"kv": "recompute"}, "kv='recompute' goes with in_flight='keep'"),
    ],
)
def test_a_mode_that_does_not_exist_is_refused(
    options: dict[str, Any], message: str, shared: RolloutClient, new: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        shared.update_weights(new, 1, **options)


def test_an_update_during_an_update_is_refused(client: RolloutClient, new: Path) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        asked.set()
        go_on.wait(60)
        yield from as_saved(new).items()

    first = threading.Thread(target=client.update_weights, args=(slow(), 1))
    first.start()
    asked.wait(60)
    with pytest.raises(RuntimeError, match="to version 2 while update_weights to version 1 is under way"):
        client.update_weights(new, version=2)
    assert client.sample(PROMPTS, sampling_params=GREEDY)[0].weight_version == 0  # it samples while it receives
    go_on.set()
    first.join()
    assert client.sample(PROMPTS, sampling_params=GREEDY)[0].weight_version == 1


def update_in_mid_flight(client: RolloutClient, source: Any, samples: int = 4, **options: Any) -> list[Any]:
    """Traces of a stream during which the weights change to version 1, when some tokens of each were sampled."""
    finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stats = client.backend.stats  # type: ignore[attr-defined]

    def sample() -> None:
        for trace in client.stream(PROMPTS, num_samples=samples, sampling_params=LONG):
            finished.put(trace)

    thread = threading.Thread(target=sample)
    thread.start()
    begun = stats.sampled_tokens
    while stats.sampled_tokens < begun + 40:
        threading.Event().wait(0.002)
    client.update_weights(source, 1, **options)
    thread.join()
    return [finished.get() for _ in range(len(PROMPTS) * samples)]


def test_wait_lets_what_has_begun_end_under_the_old_weights_and_the_rest_begin_with_the_new(
    client: RolloutClient, old: Path, new: Path
) -> None:
    traces = update_in_mid_flight(client, new)
    assert sorted({len(trace.weight_versions) for trace in traces}) == [1]
    assert [trace.weight_version for trace in traces].count(0) == 4  # max_running_requests
    for version, path in enumerate((old, new)):
        oracle = Oracle(path)
        for trace in [t for t in traces if t.weight_version == version][:3]:
            check_kept_spans({version: oracle}, trace)


def test_abort_ends_what_has_begun_with_the_tokens_it_has(client: RolloutClient, old: Path, new: Path) -> None:
    traces = update_in_mid_flight(client, new, in_flight="abort")
    aborted = [trace for trace in traces if trace.finish_reason == "abort"]
    assert len(aborted) == 4
    for trace in aborted:
        assert 0 < len(trace.completion_ids) < 120
        assert trace.weight_versions == [WeightSpan(0, 0, len(trace.token_ids) - 1)]
        check_kept_spans({0: Oracle(old)}, trace)
    assert {trace.weight_version for trace in traces if trace.finish_reason == "length"} == {1}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("overlap", [True, False])
def test_keep_goes_on_and_each_row_knows_its_weights(
    family: str, overlap: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """An oracle fills keys and values span by span with that span's weights; dataset and ReplayBatch keep spans."""
    old = checkpoint(family)
    state = {name: tensor + 0.05 * tensor.std() for name, tensor in own_names(old).items()}
    oracles = {0: Oracle(old), 1: Oracle(old)}
    oracles[1].model.load_state_dict(state)
    options = {"dtype": "float32", "max_running_requests": 4, "disable_overlap_schedule": not overlap}
    with RolloutClient.local(old, traces=tmp_path / "t", **options) as client:
        traces = update_in_mid_flight(client, state, samples=2, in_flight="keep")
    crossed = [trace for trace in traces if len(trace.weight_versions) == 2]
    assert len(crossed) >= 3
    for trace in crossed:
        assert [span.version for span in trace.weight_versions] == [0, 1]
        check_kept_spans(oracles, trace)
    dataset = TraceDataset(tmp_path / "t")
    assert dataset.verify() == []
    assert [dataset[trace.sample_id].weight_versions for trace in traces] == [t.weight_versions for t in traces]
    batch = ReplayBatch.collate(traces, spec=dataset.spec)
    assert batch.weight_versions == [list(trace.weight_versions) for trace in traces]


def test_recompute_gives_running_requests_the_keys_of_the_new_weights_under_their_recorded_rows(old: Path) -> None:
    state = {name: tensor + 0.05 * tensor.std() for name, tensor in own_names(old).items()}
    oracle = Oracle(old)
    oracle.model.load_state_dict(state)
    with RolloutClient.local(old, dtype="float32", max_running_requests=4) as client:
        traces = update_in_mid_flight(client, state, samples=2, in_flight="keep", kv="recompute")
    crossed = [trace for trace in traces if len(trace.weight_versions) == 2]
    assert len(crossed) >= 3
    for trace in crossed:
        check_recomputed(oracle, trace)


def test_a_paused_engine_takes_an_update_that_keeps_its_requests_and_refuses_one_that_would_wait_for_ever(
    client: RolloutClient, new: Path
) -> None:
    stream = client.stream(PROMPTS, sampling_params=LONG)
    thread = threading.Thread(target=lambda: seen.extend(stream))
    seen: list[Any] = []
    thread.start()
    while not client.backend.stats.sampled_tokens:  # type: ignore[attr-defined]
        threading.Event().wait(0.002)
    client.pause()
    with pytest.raises(RuntimeError, match=r"requests that are paused; resume\(\) first, or use 'keep' or 'abort'"):
        client.update_weights(new, version=1)
    client.update_weights(new, version=1, in_flight="keep")
    client.resume()
    thread.join()
    assert {tuple(span.version for span in trace.weight_versions) for trace in seen} == {(0, 1)}


def test_wait_also_waits_for_requests_that_yielded_their_slots(old: Path, new: Path) -> None:
    options = {"dtype": "float32", "max_running_requests": 4, "kv_tokens": 260}
    with RolloutClient.local(old, **options) as client:
        traces = update_in_mid_flight(client, new, samples=2)
    assert {len(trace.weight_versions) for trace in traces} == {1}
    assert {trace.weight_version for trace in traces} == {0, 1}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_memory_and_wake_gives_back_the_same_engine(
    level: int, client: RolloutClient, old: Path
) -> None:
    before = client.sample(PROMPTS, sampling_params=GREEDY, step=0)
    runner = client.backend._built.runner  # type: ignore[attr-defined]
    client.sleep(level)
    assert sum(parameter.nbytes for parameter in runner.model.parameters()) == 0
    assert sum(store.nbytes for store in (*runner.pool.keys.values(), *runner.pool.values.values())) == 0
    with pytest.raises(RuntimeError, match=r"the engine sleeps.*call wake\(\) before sampling"):
        client.sample(PROMPTS, sampling_params=GREEDY)
    with pytest.raises(RuntimeError, match="update_weights while the engine sleeps"):
        client.update_weights(old, version=1)
    with pytest.raises(RuntimeError, match="sleep while the engine sleeps"):
        client.sleep()
    if level == 2:
        with pytest.raises(ValueError, match=r"sleep\(level=2\) kept no weights: call wake\(weights, version\)"):
            client.wake()
    client.wake(*(() if level == 1 else (old, 1)))
    after = client.sample(PROMPTS, sampling_params=GREEDY, step=0)
    assert [(t.completion_ids, t.logprobs.tolist()) for t in after] == [
        (t.completion_ids, t.logprobs.tolist()) for t in before
    ]
    assert all(np.array_equal(a.routed_experts, b.routed_experts) for a, b in zip(after, before, strict=True))
    with pytest.raises(RuntimeError, match="does not sleep"):
        client.wake()


def test_weights_that_do_not_fit_leave_the_engine_asleep(client: RolloutClient, new: Path) -> None:
    client.sleep(level=2)
    with pytest.raises(ValueError, match="missing"):
        client.wake({}, 1)
    client.wake(new, 1)
    check_greedy(Oracle(new), client.sample(PROMPTS, sampling_params=GREEDY))


def test_a_sleep_that_waits_leaves_the_rest_of_a_stream_for_after_the_wake(client: RolloutClient) -> None:
    stream = client.stream(PROMPTS, num_samples=6, sampling_params=LONG)
    seen = [next(stream)]
    client.sleep()
    client.wake()
    seen += stream
    assert {(trace.finish_reason, len(trace.completion_ids)) for trace in seen} == {("length", 120)}
    assert len(seen) == 18


def test_a_directory_of_shards(client: RolloutClient, new: Path, tmp_path: Path) -> None:
    tensors = list(as_saved(new).items())
    save_file(dict(tensors[:30]), tmp_path / "a.safetensors")
    save_file(dict(tensors[30:]), tmp_path / "b.safetensors")
    client.update_weights(tmp_path, version=1)
    check_greedy(Oracle(new), client.sample(PROMPTS, sampling_params=GREEDY))
