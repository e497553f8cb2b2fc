"""Every MoE family of the installed transformers in a group of two ranks: exactly as undivided, or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from rollout.families import measured_table
from tests.families import save_tiny
from tests.rollout.oracle import routes_agree
from tests.rollout.witness import FamilyOracle

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
FAMILIES = [row.family for row in measured_table().rows if not row.served.startswith("refused")]
LAYOUTS = ("alltoall", "allgather")
TOKENS = [[5, 9, 77, 31, 8, 100, 3], [64, 2, 2, 90, 11]]
# What groups cannot run, and why. A family that leaves this list has to compute what the whole model does.
REFUSED = {
    "layers that carry a state": """
        bailing_hybrid inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lara_mini lfm2_moe minimax
        nemotron_h qwen3_5_moe qwen3_5_moe_text qwen3_next qwen4_exp qwen4_exp_text zaya""",
    "no experts that go through transformers' experts interface": "dbrx jetmoe llama4 llama4_text longcat_flash",
    "its expert weights cannot be divided": "granitemoe granitemoehybrid granitemoeshared laguna",
}
REASONS = {family: reason for reason, families in REFUSED.items() for family in families.split()}
BLOCK_IS_LAYER = ("gemma4", "gemma4_text")


def reason_of(family: str, layout: str) -> str | None:
    """Why a family is refused, if it is."""
    if family in BLOCK_IS_LAYER and layout == "allgather":
        return "is a whole decoder layer"
    return REASONS.get(family)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        save_tiny(family, path / family)
    return path


@pytest.fixture(scope="module")
def found(directory: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By family and layout, what each rank computed, or why it refused."""
    names = [(family, layout) for family in FAMILIES for layout in LAYOUTS]
    cases = [{"family": f, "layout": layout, "graph_batch": None, "tokens": TOKENS} for f, layout in names]
    (directory / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "tests.rollout.dp_ranks"]
    ranks = [subprocess.Popen([*command, str(rank), "2", str(directory)]) for rank in range(2)]
    assert [rank.wait(timeout=500) for rank in ranks] == [0, 0]
    results = [torch.load(directory / f"size2-rank{rank}.pt") for rank in range(2)]
    return dict(zip(names, map(list, zip(*results, strict=True)), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_computed_as_undivided_or_refused_by_name(family, directory, found) -> None:
    oracle: FamilyOracle | None = None
    for layout in LAYOUTS:
        ranks, reason = found[family, layout], reason_of(family, layout)
        if reason is not None:
            for rank in ranks:
                assert reason in rank["refused"]
                assert MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]].__name__ in rank["refused"]
                assert "dp_size=1" in rank["refused"]
            continue
        oracle = oracle or FamilyOracle(directory / family)
        for tokens, rank in zip(TOKENS, ranks, strict=True):
            assert rank.keys().isdisjoint({"refused", "failed"}), rank
            truth = oracle.forward(tokens)
            routes_agree(truth, rank["routes"].numpy())
            np.testing.assert_allclose(rank["logits"].numpy(), truth.logits, atol=5e-5, rtol=1e-4)
