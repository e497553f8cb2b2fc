"""Weights from another process: buckets, a broadcast over gloo, FSDP2 shards made whole. Two ranks."""

from __future__ import annotations

import faulthandler
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rollout import RolloutClient, SamplingParams
from rollout.weight_transfer import broadcast_weights, buckets, full_tensors, receive_weights
from tests.rollout.oracle import Oracle, check_greedy

PROMPTS = [[5, 7, 11], [3] * 9]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES))), st.integers(1, 300))
def test_buckets_give_back_every_tensor_and_keep_to_their_limit(shapes: list, limit: int) -> None:
    named = [(f"t{i}", torch.randint(0, 99, shape).to(dtype)) for i, (shape, dtype) in enumerate(shapes)]
    packed = list(buckets(iter(named), limit))
    back = [item for bucket in packed for item in bucket.items()]
    assert [name for name, _ in back] == [name for name, _ in named]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(back, named, strict=True))
    assert all(len(bucket.entries) == 1 or len(bucket.flat) < limit + 16 for bucket in packed)


def in_two_ranks(work: Callable[[int, str, str], None], *paths: Path) -> None:
    """`work(rank, *paths)` in two processes; an assertion that fails in one fails here."""
    mp.spawn(_rank, (work, *map(str, paths)), nprocs=2)


def _rank(rank: int, work: Callable[..., None], store: str, *paths: str) -> None:
    faulthandler.enable()  # a rank that dies in native code says where
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        work(rank, *paths)
        dist.barrier()  # none closes its sockets while the other still works
    finally:
        dist.destroy_process_group()
    os._exit(0)  # an interpreter that ends beside native threads may abort


def changed(path: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
    return model


def check_served(client: RolloutClient, path: str) -> None:
    oracle = Oracle(path)
    oracle.model.load_state_dict(changed(path).state_dict())
    check_greedy(oracle, client.sample(PROMPTS, sampling_params=GREEDY))


def breaks(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(model.state_dict().items())[:5]
    raise OSError("the trainer lost its model")


def broadcast(rank: int, path: str) -> None:
    """Rank 1 trains. Refused updates leave the ranks in step: the next broadcast is received from its beginning."""
    if rank == 1:
        model = changed(path)
        few = list(model.state_dict().items())[:-3]
        broadcast_weights(few, src=1, limit_bytes=2000)
        broadcast_weights([("x", torch.ones(1)), *few], src=1, limit_bytes=2000)
        broadcast_weights(few, src=1)
        with pytest.raises(OSError, match="lost its model"):
            broadcast_weights(breaks(model), src=1, limit_bytes=2000)
        broadcast_weights(model.state_dict().items(), src=1, limit_bytes=2000)
        return
    with RolloutClient.local(path, dtype="float32") as client:
        for message, version in (("missing", 1), (r"unknown \['x'\]", 1), ("not above", 0)):
            with pytest.raises(ValueError, match=message):
                client.update_weights(receive_weights(src=1), version)
        with pytest.raises(RuntimeError, match="the sender of the weights gave up half-way"):
            client.update_weights(receive_weights(src=1), 1)
        client.update_weights(receive_weights(src=1), 1)
        check_served(client, path)


def fsdp(rank: int, path: str) -> None:
    """Each rank holds half of every tensor; both gather, rank 0 has the client. One refused update first."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = fully_shard(changed(path), mesh=mesh)
    state = model.state_dict()
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    if rank == 1:
        for _ in range(3):
            deque(full_tensors(state), maxlen=0)
        return
    with RolloutClient.local(path, dtype="float32") as client:
        with pytest.raises(ValueError, match="not above"):
            client.update_weights(full_tensors(state), 0)
        client.update_weights(full_tensors(state), 1)
        check_served(client, path)
        client.update_weights(state, 2)
        check_served(client, path)


@pytest.mark.full
@pytest.mark.parametrize("work", [broadcast, fsdp])
def test_a_trainer_in_other_processes(work: Callable, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    in_two_ranks(work, tmp_path / "store", checkpoint("qwen3_moe"))


@pytest.mark.full
def test_saved_names_of_every_family_lead_back_to_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from rollout.checkpoint_names import CheckpointNames
    from rollout.families import measured_table
    from tests.families import save_tiny

    for row in measured_table().rows:
        path = tmp_path / row.family
        model = AutoModelForCausalLM.from_pretrained(save_tiny(row.family, path), dtype=torch.float32)
        model.save_pretrained(path / "saved")
        files = {k: v for file in (path / "saved").glob("*.safetensors") for k, v in load_file(file).items()}
        names, own = CheckpointNames(model), model.state_dict()
        assert files.keys() - names.saved.keys() == set(), row.family
        assert names.saved.keys() - files.keys() <= names.tied, row.family
        back = dict(names.convert(files))
        assert own.keys() - back.keys() <= names.tied, row.family
        assert all(torch.equal(tensor, own[name]) for name, tensor in back.items()), row.family
