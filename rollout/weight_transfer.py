"""Weights on their way from a trainer's processes: sharded tensors made whole, buckets, broadcast.

The trainer's side and the engine's side of one wire, in one file. A bucket is a list of `[name, dtype, shape]` and one
flat buffer of bytes, each tensor at a multiple of 16 bytes; no pickle.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

NamedTensor: TypeAlias = tuple[str, torch.Tensor]
BUCKET_BYTES = 256 * 2**20
ALIGNMENT = 16
_END, _GAVE_UP = 0, -1


def _primed(make: Callable[..., Generator[Any, None, None]]) -> Callable[..., Generator[NamedTensor, None, None]]:
    """Advance a new generator to its first, empty yield: closing it then runs its `finally` even if nobody iterated."""

    @functools.wraps(make)
    def primed(*args: Any, **kwargs: Any) -> Generator[NamedTensor, None, None]:
        generator = make(*args, **kwargs)
        next(generator)
        return generator

    return primed


@_primed
def full_tensors(state_dict: Mapping[str, Any]) -> Generator[Any, None, None]:
    """`(name, tensor)` of a state dict; sharded tensors (DTensors, as of FSDP2) are made whole one at a time.

    Gathering is collective: each rank of the trainer must iterate, also those that have no client. Closing it early
    gathers the rest, so that the other ranks do not wait for ever.

    >>> weights = full_tensors(fsdp_model.state_dict())
    >>> client.update_weights(weights, version=1) if rank == 0 else collections.deque(weights, maxlen=0)
    """
    left = iter(state_dict.items())
    try:
        yield
        for name, tensor in left:
            yield name, _whole(tensor)
    finally:
        for _, tensor in left:
            _whole(tensor)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Bucket(NamedTuple):
    """Some tensors in one flat uint8 buffer. `entries` are `[name, dtype, shape]`, JSON values."""

    entries: list[list[Any]]
    flat: torch.Tensor

    def items(self) -> Iterator[NamedTensor]:
        """The tensors, as views of the buffer."""
        at = 0
        for name, dtype, shape in self.entries:
            kind = getattr(torch, dtype)
            size = math.prod(shape) * kind.itemsize
            yield name, self.flat[at : at + size].view(kind).view(shape)
            at += _aligned(size)


def buckets(named: Iterable[NamedTensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets of at most `limit_bytes`, or of one tensor that is larger; one at a time is in memory.

    >>> [[entry[0] for entry in bucket.entries] for bucket in buckets({"a": torch.ones(3), "b": torch.ones(2)}.items())]
    [['a', 'b']]
    """
    waiting: list[NamedTensor] = []
    size = 0
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"weight {name!r} is no dense tensor with values; nothing was changed")
        if waiting and size + tensor.nbytes > limit_bytes:
            yield _pack(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += _aligned(tensor.nbytes)
    if waiting:
        yield _pack(waiting)


def _pack(named: list[NamedTensor]) -> Bucket:
    entries = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in named]
    flat = torch.zeros(sum(_aligned(t.nbytes) for _, t in named), dtype=torch.uint8, device=named[0][1].device)
    at = 0
    for _, tensor in named:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        flat[at : at + len(raw)] = raw
        at += _aligned(len(raw))
    return Bucket(entries, flat)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT


def broadcast_weights(
    named: Iterable[NamedTensor], group: Any = None, src: int = 0, limit_bytes: int = BUCKET_BYTES
) -> None:
    """The trainer's side: send tensors to `receive_weights` on the other ranks of a `torch.distributed` group.

    >>> broadcast_weights(model.state_dict().items(), group)  # on rank 0
    >>> client.update_weights(receive_weights(group), version=1)  # on the engine's rank

    Returns when every rank has received all of it: the trainer may then change its weights or end. When `named` fails
    half-way, the receivers are told and refuse the update. `src` is a global rank; gloo or NCCL.
    """
    device = _device_of(group)
    done = False
    try:
        for bucket in buckets(named, limit_bytes):
            header = torch.frombuffer(bytearray(json.dumps(bucket.entries).encode()), dtype=torch.uint8)
            _broadcast(torch.tensor([len(header), len(bucket.flat)]), device, group, src)
            _broadcast(header, device, group, src)
            _broadcast(bucket.flat, device, group, src)
        done = True
    finally:
        _broadcast(torch.tensor([_END if done else _GAVE_UP, 0]), device, group, src)
        torch.distributed.barrier(group)  # all has arrived: a process that ends now drops nothing that is under way


@_primed
def receive_weights(group: Any = None, src: int = 0) -> Generator[Any, None, None]:
    """The engine's side of `broadcast_weights`. Closing it early receives and drops the rest: ranks stay in step.

    The sender waits for its end: iterate it to the end, or close it.

    Raises:
        RuntimeError: the sender gave up.
    """
    device = _device_of(group)
    lengths = [1, 0]  # not at the end yet
    try:
        yield
        while (lengths := _receive_lengths(device, group, src))[0] > 0:
            yield from _receive_bucket(lengths, device, group, src).items()
        if lengths[0] == _GAVE_UP:
            raise RuntimeError("the sender of the weights gave up half-way; nothing was changed")
    finally:
        while lengths[0] > 0:
            if (lengths := _receive_lengths(device, group, src))[0] > 0:
                _receive_bucket(lengths, device, group, src)


def _receive_lengths(device: torch.device, group: Any, src: int) -> list[int]:
    """Bytes of the next bucket's header and buffer; at the end, the sender waits until every receiver is here."""
    lengths: list[int] = _receive(2, torch.int64, device, group, src).tolist()
    if lengths[0] <= 0:
        torch.distributed.barrier(group)
    return lengths


def _receive_bucket(lengths: list[int], device: torch.device, group: Any, src: int) -> Bucket:
    header = _receive(lengths[0], torch.uint8, device, group, src)
    flat = _receive(lengths[1], torch.uint8, device, group, src)
    return Bucket(json.loads(bytes(header.tolist())), flat)


def _receive(length: int, dtype: torch.dtype, device: torch.device, group: Any, src: int) -> torch.Tensor:
    return _broadcast(torch.empty(length, dtype=dtype, device=device), device, group, src)


def _broadcast(tensor: torch.Tensor, device: torch.device, group: Any, src: int) -> torch.Tensor:
    tensor = tensor.to(device)
    torch.distributed.broadcast(tensor, src=src, group=group)
    return tensor


def _device_of(group: Any) -> torch.device:
    """Where the group's tensors live: NCCL moves device memory, gloo that of the host."""
    is_nccl = "nccl" in str(torch.distributed.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
