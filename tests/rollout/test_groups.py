"""Groups of ranks behind the client: what they sample is what one engine samples, whatever happens to a rank."""

import os
import re
import signal
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.backend import SampleRequest
from rollout.group_backend import GroupBackend
from rollout.parallel import CollectiveError
from rollout.rank_link import RankSet, launch_processes, members
from rollout.rank_messages import RankStart
from tests.actors.waiting import eventually
from tests.families import save_tiny

PROMPTS = [[5, 9, 77, 31], [8, 100], [3, 4] * 10, [7, 8, 9], [11] * 9, [64], [90, 2, 2, 17, 80]]
SEEDED = SamplingParams(max_tokens=12, seed=3)
GREEDY = SamplingParams(max_tokens=12, temperature=0, seed=0)
SLACK = 10  # seconds, on a busy machine
SMALL = {"dtype": "float32", "max_running_requests": 4, "collective_timeout_s": 30}


def sample(client, params, prompts=PROMPTS, only=None, last_first=False):
    """The traces in order, under the same sample ids, and so the same random numbers, each time."""
    requests = [SampleRequest(f"run/0/{i}-0/0", 0, tuple(ids), params) for i, ids in enumerate(prompts)]
    requests = [request for i, request in enumerate(requests) if only in (None, i)][:: -1 if last_first else 1]
    found = [trace for finished in client.backend.stream(requests) for trace in finished.traces()]
    assert sorted(trace.sample_id for trace in found) == sorted(request.sample_id for request in requests)
    return sorted(found, key=lambda trace: int(trace.sample_id.split("/")[2].split("-")[0]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return cache(lambda family: save_tiny(family, tmp_path_factory.mktemp("groups") / family))


@pytest.fixture(scope="module")
def alone(model):
    """What one engine samples, as often as it is asked for."""

    @cache
    def sampled(family, params, count=7):
        with RolloutClient.local(model(family), **SMALL) as client:
            return sample(client, params, PROMPTS[:count])

    return sampled


@pytest.fixture(scope="module")
def pair(model):
    """Two ranks; tests leave them as they found them."""
    with RolloutClient.local(model("qwen3_moe"), dp_size=2, **SMALL) as client:
        yield client


def test_figures_are_those_of_all_ranks(pair):
    before = pair.stats()
    pair.sample(PROMPTS, sampling_params=SamplingParams(max_tokens=4, seed=1, ignore_eos=True))
    after = pair.stats()
    counted = {name: after[name] - before[name] for name in before if name.endswith("_total")}
    assert counted["requests_ended_total"] == len(PROMPTS)
    assert counted["tokens_sampled_total"] == 4 * len(PROMPTS)
    assert counted["tokens_computed_total"] == sum(map(len, PROMPTS)) + 3 * len(PROMPTS)
    assert (after["engines"], after["requests_running"], after["missing_route_rows_total"]) == (1, 0, 0)


def check_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.completion_ids == other.completion_ids
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-5)


@pytest.mark.parametrize("params", [SEEDED, GREEDY], ids=["seeded", "greedy"])
def test_two_ranks_sample_what_one_engine_samples(pair, alone, params):
    check_same(sample(pair, params), alone("qwen3_moe", params))


def test_a_single_request_leaves_a_rank_without_work(pair, alone):
    check_same(sample(pair, SEEDED, PROMPTS[:1]), alone("qwen3_moe", SEEDED, 1))


def test_each_rank_has_half_the_experts_and_a_part_of_the_requests(pair, model):
    sample(pair, SEEDED)
    ranks = pair.backend.rank_stats()
    whole = AutoModelForCausalLM.from_pretrained(model("qwen3_moe"), dtype=torch.float32)
    size = sum(p.nbytes for name, p in whole.named_parameters() if ".experts." in name)
    assert [rank["expert_bytes"] for rank in ranks] == [size // 2] * 2
    assert all(rank["sampled_tokens"] > 0 for rank in ranks)
    assert ranks[0]["forwards"] == ranks[1]["forwards"]


def test_pause_keeps_the_requests_of_all_ranks_waiting(pair, alone):
    pair.pause()
    found = []
    worker = threading.Thread(target=lambda: found.extend(sample(pair, SEEDED)))
    worker.start()
    worker.join(0.3)
    assert worker.is_alive()
    pair.resume()
    worker.join()
    check_same(found, alone("qwen3_moe", SEEDED))


def changed(model, seed):
    """The state dict of the same model with other weights."""
    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return other


def written(client):
    """Directories of weights that the group's front end keeps on disk."""
    return [path.name for path in Path(client.backend._directory.name).glob("weights-*")]


def test_an_update_reaches_all_ranks_or_none(model, pair, alone, tmp_path):
    path = model("qwen3_moe")
    other = changed(path, 1)
    incomplete = {name: tensor for name, tensor in other.state_dict().items() if "experts.down_proj" not in name}
    with pytest.raises(ValueError, match=r"missing .*down_proj.*nothing was changed"):
        pair.update_weights(incomplete, 1)
    with pytest.raises(ValueError, match="need 8 experts"):
        pair.update_weights({n: t[:4] if ".experts." in n else t for n, t in other.state_dict().items()}, 1)
    with pytest.raises(ValueError, match="comes twice"):
        pair.update_weights(iter([*other.state_dict().items()] * 2), 1)
    assert written(pair) == []
    check_same(sample(pair, SEEDED), alone("qwen3_moe", SEEDED))
    pair.update_weights(other.state_dict(), 1)
    assert [name[:9] for name in written(pair)] == ["weights-1"]
    found = sample(pair, SEEDED)
    other.save_pretrained(tmp_path)
    with RolloutClient.local(tmp_path, **SMALL) as client:
        check_same(found, sample(client, SEEDED))
    assert {span.version for trace in found for span in trace.weight_versions} == {1}
    pair.update_weights(path, 2)  # numbered experts, from the files
    assert written(pair) == []
    assert (path / "config.json").exists()
    check_same(sample(pair, SEEDED), alone("qwen3_moe", SEEDED))


@pytest.mark.full
def test_allgather_with_shared_experts_and_graph_padding(model, alone):
    options = {"dp_size": 2, "moe_dispatch": "allgather", "graph_batches": (2, 4), **SMALL}
    backend = GroupBackend(str(model("deepseek_v3")), **options)
    with RolloutClient(backend) as client:
        check_same(sample(client, SEEDED), alone("deepseek_v3", SEEDED))
        check_same(sample(client, SEEDED, PROMPTS[:1]), alone("deepseek_v3", SEEDED, 1))
        assert {rank["capture_rows"] for rank in backend.rank_stats()} == {2 * (2048 + 32)}  # of both ranks
        assert all(rank["graph_steps"] > 0 for rank in backend.rank_stats())
        assert "use moe_dispatch='alltoall'" in client.info.not_forced


def test_a_size_that_does_not_divide_the_experts_is_refused(model):
    with pytest.raises(ValueError, match="dp_size 3 does not divide 8 experts; use one of"):
        RolloutClient.local(model("qwen3_moe"), dp_size=3, **SMALL)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_families_layouts_and_sizes(model, alone, family, dispatch, size):
    backend = GroupBackend(str(model(family)), dp_size=size, moe_dispatch=dispatch, graph_batches=(1, 2, 4), **SMALL)
    with RolloutClient(backend) as client:
        for params in (SEEDED, GREEDY):
            check_same(sample(client, params), alone(family, params))
        check_same(sample(client, SEEDED, PROMPTS[:1]), alone(family, SEEDED, 1))
        assert all(rank["graph_steps"] > 0 for rank in backend.rank_stats())


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "size", "dispatch"),
    [
        ("qwen3_moe", 2, "alltoall"),
        ("qwen3_moe", 2, "allgather"),
        ("qwen3_moe", 4, "allgather"),
        ("deepseek_v3", 2, "allgather"),
        ("deepseek_v3", 4, "alltoall"),
        ("gpt_oss", 2, "alltoall"),
        ("gpt_oss", 4, "allgather"),
    ],
)
def test_batch_invariant_runs_give_the_same_bits_however_the_ranks_are_loaded(model, family, size, dispatch):
    options = {"dp_size": size, "moe_dispatch": dispatch, "batch_invariant": True, **SMALL}
    with RolloutClient.local(model(family), **options) as client:
        together = {params: sample(client, params) for params in (SEEDED, GREEDY)}
        backwards = {params: sample(client, params, PROMPTS[:3], last_first=True) for params in together}
        for index in (0, 2, 5):
            check_bits(sample(client, SEEDED, PROMPTS, only=index), together[SEEDED][index : index + 1])
    with RolloutClient.local(model(family), **options) as client:
        for params, traces in together.items():
            check_bits(sample(client, params), traces)
            check_bits(backwards[params], traces[:3])


def check_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.completion_ids == other.completion_ids
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)
        np.testing.assert_array_equal(one.logprobs.view(np.uint32), other.logprobs.view(np.uint32))


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "other", "named"),
    [
        ("deepseek_v3", {"max_batch_tokens": 64}, "checkpoint and max_batch_tokens"),
        ("trained", {}, "checkpoint"),
        ("qwen3_moe", {"dtype": "bfloat16", "batch_invariant": True}, "dtype and batch_invariant"),
    ],
)
def test_ranks_with_different_checkpoints_and_options_are_refused_by_name(model, tmp_path, family, other, named):
    options = {**SMALL, "dp_size": 2}
    links, meeting = launch_processes(2, str(tmp_path), options)
    parts = members(2, "alltoall", meeting, 30, ())
    if family == "trained":  # the same names, shapes and config
        changed(model("qwen3_moe"), 1).save_pretrained(path := tmp_path / "trained")
    else:
        path = model(family)
    starts = [RankStart(str(model("qwen3_moe")), parts[0], options), RankStart(str(path), parts[1], options | other)]
    with pytest.raises(ValueError, match=f"rank 1 has another {named} than rank 0"):
        RankSet(links, lambda ended: None, lambda ranks, reason: None).start(starts)


@pytest.mark.full
def test_a_rank_that_never_comes_is_missed_in_time(model):
    options = {**SMALL, "dp_size": 2}
    links, meeting = launch_processes(2, str(model("qwen3_moe").parent), options)
    first = members(2, "alltoall", meeting, 3, ())[0]
    links[1].kill()
    with pytest.raises(CollectiveError, match="rank 0 of 2 waited 3 s for the others"):
        RankSet(links[:1], lambda ended: None, lambda ranks, reason: None).start(
            [RankStart(str(model("qwen3_moe")), first, options)]
        )


@pytest.mark.full
def test_a_rank_whose_client_is_gone_leaves_while_it_waits_for_the_others(model, tmp_path):
    options = {**SMALL, "dp_size": 2}
    links, meeting = launch_processes(2, str(tmp_path), options)
    links[1].kill()
    links[0].send(RankStart(str(model("qwen3_moe")), members(2, "alltoall", meeting, 300, ())[0], options))
    assert eventually(lambda: Path(meeting.removeprefix("file://")).exists(), seconds=120)
    links[0]._connection.close()
    assert links[0].process.wait(timeout=30) == 1


def seconds_until(condition):
    begun = time.monotonic()
    assert eventually(condition, seconds=120)
    return time.monotonic() - begun


@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_dies_or_stands_still_costs_no_sample(model, how):
    params = SamplingParams(max_tokens=60, seed=3)
    prompts = PROMPTS * 4
    with RolloutClient.local(model("qwen3_moe"), **SMALL) as client:
        expected = client.sample(prompts, sampling_params=params)
    with RolloutClient.local(model("qwen3_moe"), dp_size=2, **{**SMALL, "collective_timeout_s": 5}) as client:
        first = client.backend.ranks
        found, seconds = {}, []
        for trace in client.stream(prompts, sampling_params=params):
            assert trace.sample_id not in found
            found[trace.sample_id] = trace
            if len(found) == 2:
                os.kill(first.links[1].process.pid, how)
                watch = threading.Thread(target=lambda: seconds.append(seconds_until(lambda: first.reason)))
                watch.start()
        assert client.backend.ranks is not first
        watch.join()
    if how is signal.SIGSTOP:
        assert re.search(r"CollectiveError: rank 0 of 2, step \d+: .* did not complete", str(first.reason))
        assert seconds[0] < 5 + SLACK
    else:
        assert seconds[0] < SLACK
    check_same([found[trace.sample_id] for trace in expected], expected)


@pytest.mark.chaos
def test_a_group_that_is_started_again_has_the_current_weights(model):
    path = model("qwen3_moe")
    with RolloutClient.local(path, dp_size=2, **SMALL) as client:
        for version, seed in ((3, 3), (4, 2), (5, 1)):
            client.update_weights(changed(path, seed).state_dict(), version)
        with pytest.raises(ValueError, match="nothing was changed"):
            client.update_weights({"no.such.weight": torch.zeros(1)}, 6)
        assert [name[:9] for name in written(client)] == ["weights-5"]
        before = sample(client, GREEDY)
        client.backend.ranks.links[0].process.kill()
        after = sample(client, GREEDY)
        assert {span.version for trace in after for span in trace.weight_versions} == {5}
    check_same(after, before)
