"""One rank of two, run as a process by test_replay_trainers.py: replay under FSDP2.

    python -m tests.rollout.fsdp_replay RANK CHECKPOINT DIRECTORY

Each rank forwards its own half of `batch.pt`; rank 0 saves the full gradients, averaged over ranks as FSDP does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollout import RouterReplay
from tests.rollout.routes import load


def main(rank: int, checkpoint: str, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = load(checkpoint).train()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    replay = RouterReplay(model)
    given = torch.load(directory / "batch.pt")
    with replay(given["routes"][rank].numpy()):
        model(input_ids=given["tokens"][rank][None]).logits.square().mean().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients[name] = parameter.grad.full_tensor()
    if rank == 0:
        torch.save({"gradients": gradients, "report": replay.report().forced_rows}, directory / "out.pt")
    dist.barrier()  # none closes its sockets while the other still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
    os._exit(0)  # an interpreter that ends beside native threads may abort
