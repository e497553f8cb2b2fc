"""Continuing a recorded trace: the whole is one sequence, with the rows, logprobs and versions it had."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from storage import TraceDataset
from storage.trace import WeightSpan
from tests.rollout.flipped import flipped_selection
from tests.rollout.probes import device_held_at, parts_of, prompts, wait_until

PARAMS = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=3)
SHORT = PARAMS.model_copy(update={"max_tokens": 9})


@pytest.fixture(scope="module")
def path(checkpoint):
    return checkpoint("qwen3_moe")


@pytest.fixture(scope="module")
def whole(path):
    with RolloutClient.local(path, batch_invariant=True) as client:
        return client.sample(prompts(3), sampling_params=PARAMS, step=0)


def bits(trace):
    floats = trace.logprobs.tobytes(), trace.raw_logprobs.tobytes()
    return trace.token_ids, floats, trace.routed_experts.tolist(), trace.finish_reason


@pytest.fixture
def client(path):
    with RolloutClient.local(path, batch_invariant=True) as client:
        yield client


def test_a_continued_trace_is_the_one_of_an_uninterrupted_run(client, whole):
    short = client.sample(prompts(3), sampling_params=SHORT, step=0)
    assert [len(trace.completion_ids) for trace in short] == [9] * 3
    merged = client.sample(resume=short, sampling_params=PARAMS, step=1)
    assert [bits(trace) for trace in merged] == [bits(trace) for trace in whole], "random numbers go on, too"
    assert [trace.sample_id for trace in merged] == [f"run/1/0.0-{i}/0" for i in range(3)]
    assert [trace.group_id for trace in merged] == [trace.group_id for trace in short]
    assert client.backend.stats.tokens == 3 * (5 + 8) + 3 * (5 + 8 + 15), "the prefix is computed again, in one go"


def test_in_another_process_after_the_dataset_and_in_two_goes(path, whole, tmp_path):
    with RolloutClient.local(path, batch_invariant=True, traces=tmp_path) as first:
        first.sample(prompts(3), sampling_params=SHORT, step=0)
    with RolloutClient.local(path, batch_invariant=True, traces=tmp_path) as second:
        halfway = PARAMS.model_copy(update={"max_tokens": 15, "seed": None})
        longer = second.sample(resume=list(TraceDataset(tmp_path).iter(step=0)), sampling_params=halfway, step=1)
        again = second.sample(resume=list(TraceDataset(tmp_path).iter(step=1)), sampling_params=PARAMS, step=2)
    assert [len(trace.completion_ids) for trace in longer] == [15] * 3
    found = sorted(again, key=lambda trace: trace.sample_id)
    assert [bits(trace) for trace in found] == [bits(trace) for trace in whole]
    assert found[0].sample_id == "run/2/1.0.0-0/0"
    assert found[0].metadata == {"resumed_from": "run/0/0-0/0"}
    assert TraceDataset(tmp_path).verify() == []


def test_the_prefix_follows_its_recorded_rows_whatever_the_routers_would_choose_now(client, whole):
    """The selection is flipped: the old rows stay, and the logits are those of a sequence flipped only behind them."""
    short = client.sample(prompts(3), sampling_params=SHORT, step=0)
    with flipped_selection(client, 0):
        merged = client.sample(resume=short, sampling_params=PARAMS, step=1)
    with flipped_selection(client, 9):  # steps 0 to 8 sampled the 9 tokens
        truth = client.sample(prompts(3), sampling_params=PARAMS, step=0)
    assert [bits(trace) for trace in merged] == [bits(trace) for trace in truth]
    assert np.array_equal(merged[0].routed_experts[:13], whole[0].routed_experts[:13])
    assert not np.array_equal(merged[0].routed_experts, whole[0].routed_experts)


def test_rows_know_the_weights_that_computed_them(client):
    (short,) = client.sample(prompts(1), sampling_params=SHORT)
    model = parts_of(client)[2]
    client.update_weights({name: tensor * 1.01 for name, tensor in model.state_dict().items()}, version=4)
    (merged,) = client.sample(resume=[short], sampling_params=PARAMS)
    assert merged.weight_versions == [WeightSpan(0, 0, 13), WeightSpan(4, 13, 28)]
    assert np.array_equal(merged.logprobs[:9], short.logprobs)
    assert np.array_equal(merged.routed_experts[:13], short.routed_experts)


def test_an_aborted_trace_goes_on_under_its_own_parameters(client, whole):
    with device_held_at(client, 7) as release:
        partial: list = []
        sampling = threading.Thread(
            target=lambda: partial.extend(client.sample(prompts(3), sampling_params=PARAMS, step=0))
        )
        sampling.start()
        wait_until(lambda: client.backend.stats.forwards >= 8)
        client.abort("all")
        release.set()
        sampling.join()
    assert {trace.finish_reason for trace in partial} == {"abort"}
    assert all(len(trace.routed_experts) == 5 + len(trace.completion_ids) - 1 for trace in partial)
    merged = client.sample(resume=partial)
    assert [bits(trace) for trace in merged] == [bits(trace) for trace in whole]


def test_a_trace_aborted_before_its_first_token_begins_anew(client, whole):
    empty = {name: [] for name in ("completion_ids", "logprobs", "raw_logprobs", "weight_versions")}
    nothing = dataclasses.replace(whole[0], **empty, routed_experts=None, finish_reason="abort")
    (merged,) = client.sample(resume=[nothing])
    assert bits(merged) == bits(whole[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "stop"}, r"resume 0 \(run/0/0-0/0\) ended with 'stop'; only 'abort' and 'length' can go on"),
        ({"routed_experts": None}, "has no routes or no raw logprobs; sample its prompt again instead"),
        ({"model": "0123456789abcdef"}, "was sampled by a model with fingerprint 0123456789abcdef, this one has"),
        ({"raw_logprobs": None}, "has no routes or no raw logprobs"),
        ({"prompt_ids": [5, 6, 7, 8, 96]}, r"token id outside the vocabulary \[0, 96\); it is another model's"),
        ({"routed_experts": "one site"}, r"does not fit this model: .* shape \(28, 1, 2\), need \[rows, 2, 2\]"),
        ({"routed_experts": "id 8"}, r"does not fit this model: .* has an id in \[\d, 8\], need \[0, 8\)"),
        ({"routed_experts": "zeros"}, r"names an expert twice: \[0, 0\]; a row that was not recorded"),
        ({"route_valid": "one not"}, "lacks rows: all from position 0 on must be recorded and valid"),
        ({"route_start": 4}, "lacks rows: all from position 0 on must be recorded and valid"),
        (
            {},
            "has 24 completion tokens and max_tokens is 24, which counts them too; pass sampling_params with a larger",
        ),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(client, whole, change, message):
    routes = whole[0].routed_experts
    made = {
        "one site": routes[:, :1],
        "id 8": np.where(np.arange(28)[:, None, None] == 3, [[[8, 1]] * 2], routes),
        "zeros": np.zeros_like(routes),
        "one not": np.arange(28) != 28,
    }
    change = {key: made.get(value, value) if isinstance(value, str) else value for key, value in change.items()}
    if "route_valid" in change:
        change = {"route_valid": np.arange(28) > 0, "routed_experts": routes * (np.arange(28) > 0)[:, None, None]}
    if "route_start" in change:
        change["routed_experts"] = routes[4:]
    trace = dataclasses.replace(whole[0], **change)
    with pytest.raises(ValueError, match=message):
        client.sample(resume=[trace])
    assert client.backend.stats.forwards == 0


def test_arguments_that_contradict_each_other_are_refused(client, whole):
    more = PARAMS.model_copy(update={"max_tokens": 40})
    with pytest.raises(ValueError, match=r"was sampled with seed 3, not 4; leave the seed out"):
        client.sample(resume=whole[:1], sampling_params=more.model_copy(update={"seed": 4}))
    with pytest.raises(ValueError, match="resume= takes sampling_params and step only"):
        client.sample(prompts(1), resume=whole[:1])
    with pytest.raises(ValueError, match="resume= takes sampling_params and step only"):
        client.sample(resume=whole[:1], num_samples=2)
    with pytest.raises(TypeError, match="resume must be a non-empty list of traces"):
        client.sample(resume=[])


def test_an_engine_without_capture_continues_nothing(path, whole):
    with RolloutClient.local(path, enable_return_routed_experts=False) as client:
        with pytest.raises(ValueError, match="cannot repeat recorded routes: it records no routes"):
            client.sample(resume=whole[:1], sampling_params=PARAMS.model_copy(update={"max_tokens": 40}))


def test_optional_logprobs_are_those_of_both_parts(client):
    top = {"logprobs": 3}
    short = client.sample(prompts(1), sampling_params=SHORT.model_copy(update=top), step=0)
    whole = client.sample(prompts(1), sampling_params=PARAMS.model_copy(update=top), step=0)
    merged = client.sample(resume=short, sampling_params=PARAMS.model_copy(update=top))
    assert merged[0].top_ids.tolist() == whole[0].top_ids.tolist()
    assert merged[0].raw_top_logprobs.tobytes() == whole[0].raw_top_logprobs.tobytes()
    with pytest.raises(ValueError, match="has 3 logprobs per token and 5 are asked for"):
        client.sample(resume=short, sampling_params=PARAMS.model_copy(update={"logprobs": 5}))
