"""One rank of a group, run as a process by the tests: plain forwards with divided experts.

    python -m tests.rollout.dp_ranks RANK SIZE DIRECTORY

The directory holds `cases.json` and one checkpoint per family; `size<S>-rank<R>.pt` gets the logits and routes of every
case, or the text of the ValueError that refused it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollout.expert_parallel import use_expert_parallel
from rollout.experts import COMPACT
from rollout.group_start import refuse_states
from rollout.parallel import RankGroup, StepShape, join_group
from rollout.router import watch
from rollout.sharded_loader import load_rank
from storage.sites import find_routers

HUNG_S = 200


def attempt(case: dict[str, Any], directory: Path, rank: int, group: Any) -> dict[str, Any]:
    """`run_case`, or why the family is refused, or what failed."""
    try:
        return run_case(case, directory, rank, group)
    except ValueError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"failed": repr(error)}


def run_case(case: dict[str, Any], directory: Path, rank: int, group: Any) -> dict[str, Any]:
    """Forward this rank's tokens, padded as the case says; a rank without tokens joins with padding."""
    size = len(case["tokens"])
    model = load_rank(str(directory / case["family"]), torch.float32, rank, size)
    refuse_states(model)
    ranks = RankGroup(rank, size, case["layout"], group)
    use_expert_parallel(model, ranks, COMPACT)
    shape = StepShape(tuple(len(tokens) for tokens in case["tokens"]), case["graph_batch"])
    seen: dict[int, torch.Tensor] = {}
    ranks.begin(0, StepShape((2,) * size))
    stop = watch(model, find_routers(model), lambda site, ids: seen.__setitem__(site, ids.clone()))
    ranks.begin(1, shape)
    own = case["tokens"][rank]
    padded = own + [0] * (shape.rows[rank] - len(own))
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([padded]), use_cache=False).logits[0]
    stop()
    start, length = shape.local_slice(rank) if case["layout"] == "allgather" else (0, len(own))
    return {
        "logits": logits[: len(own)],
        "routes": torch.stack([seen[site][start : start + length] for site in sorted(seen)], dim=1),
        "expert_bytes": sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name),
    }


def main(rank: int, size: int, directory: Path) -> None:
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    torch.set_num_threads(1)
    group, _ = join_group(rank, size, f"file://{directory}/rendezvous{size}", timeout_s=60)
    cases = [case for case in json.loads((directory / "cases.json").read_text()) if len(case["tokens"]) == size]
    torch.save([attempt(case, directory, rank, group) for case in cases], directory / f"size{size}-rank{rank}.pt")
    dist.barrier(group)
    os._exit(0)  # as the ranks of a group do: the end of an interpreter beside gloo's threads once hung


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
