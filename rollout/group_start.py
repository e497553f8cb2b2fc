"""What the ranks of a group check when they start: that each can take part, and that all were started alike."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rollout.config import EngineOptions
from rollout.loader import check_files
from rollout.lockstep import Lockstep, Membership
from rollout.sharded_loader import checkpoint_directory
from rollout.state_layers import find_state_modules

SAMPLES, PAGE = 64, 4096
NOT_FORCED = (
    "with moe_dispatch='allgather' the routers of a rank see the tokens of all ranks, of which it knows no rows to "
    "force; use moe_dispatch='alltoall'"
)


def check_member(path: str, options: EngineOptions, member: Membership) -> None:
    """Raises ValueError for an option that a group does not have, FileNotFoundError without a checkpoint."""
    check_files(path)
    if options.device != "cpu":
        raise ValueError(f"dp_size={member.size} with device={options.device!r}: groups of ranks run on 'cpu' so far")
    if options.experts_implementation != "auto":
        raise ValueError(
            f"dp_size={member.size} with experts_implementation={options.experts_implementation!r}: the experts of a "
            "group are computed by its own implementation; leave it 'auto'"
        )
    if options.batch_invariant and member.graph_batches:
        raise ValueError("batch_invariant=True pads every rank by itself; leave graph_batches out")
    if any(not 0 < rows <= options.max_batch_tokens for rows in member.graph_batches):
        raise ValueError(
            f"graph_batches are {member.graph_batches}, need sizes from 1 to max_batch_tokens="
            f"{options.max_batch_tokens}: routes of larger steps have no room in the capture buffer"
        )


def join(path: str, options: EngineOptions, member: Membership) -> Lockstep:
    """Join the group and compare.

    Raises:
        CollectiveError: not all ranks came.
        ValueError: on every rank, naming what one of them was started with and the others were not.
    """
    lockstep = Lockstep.join(member)
    try:
        lockstep.compare(facts(path, options, member), "what the ranks were started with")
    except BaseException:
        lockstep.leave()
        raise
    return lockstep


def facts(path: str, options: EngineOptions, member: Membership) -> dict[str, str]:
    """What must be the same on all ranks: configs of the checkpoint, which decide the routing spec too, samples of its
    weights, and every option."""
    own = {"checkpoint": _checkpoint(path), "layout": member.layout, "graph_batches": repr(member.graph_batches)}
    return own | {name: repr(value) for name, value in options.model_dump().items()}


def refuse_states(model: Any) -> None:
    """Raises ValueError for a model with layers that carry a state: a rank without work has none to go on with."""
    if find_state_modules(model):
        raise ValueError(f"{type(model).__name__} has layers that carry a state; a group cannot run it, use dp_size=1")


def _checkpoint(path: str) -> str:
    """Files by name and hash: `config.json 4af1..., model.safetensors 77c0...`; the generation config too, whose end
    tokens stop a rank's requests; weights by size and samples of them."""
    directory = checkpoint_directory(path)
    texts = [directory / "config.json", directory / "generation_config.json", *directory.glob("*.index.json")]
    hashes = {file.name: hashlib.sha256(file.read_bytes()) for file in texts if file.is_file()}
    hashes |= {file.name: _sampled(file) for file in directory.glob("*.safetensors")}
    return ", ".join(f"{name} {hashed.hexdigest()[:12]}" for name, hashed in sorted(hashes.items()))


def _sampled(file: Path) -> Any:
    """Hash the size and 64 pages at equal distances: whole files would take minutes, and training changes all pages."""
    size = file.stat().st_size
    hashed = hashlib.sha256(str(size).encode())
    with file.open("rb", buffering=0) as pages:
        for start in range(0, size, max(size // SAMPLES, PAGE)):
            pages.seek(start)
            hashed.update(pages.read(PAGE))
    return hashed
