"""Experts divided among the processes of a gloo group: every rank's rows are those of the whole model."""

import json
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.router import watch
from storage.sites import find_routers
from tests.families import save_tiny

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
PROMPTS = [[5, 9, 77, 31, 8, 100, 3], [], [64, 2, 2, 90, 11], [127]]  # a rank without work is among them


def cases(size):
    tokens = PROMPTS[:size]
    return [
        {"family": family, "layout": layout, "graph_batch": graph, "tokens": tokens}
        for family in FAMILIES
        for layout, graph in (("alltoall", None), ("allgather", None), ("allgather", 8))
    ]


CASES = [*cases(2), *cases(4)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        save_tiny(family, path / family)
    (path / "cases.json").write_text(json.dumps(CASES))
    return path


@pytest.fixture(scope="module")
def found(directory):
    """What each rank of a case computed; the processes of a group size run all its cases, once."""

    @cache
    def run(size):
        command = [sys.executable, "-m", "tests.rollout.dp_ranks"]
        ranks = [subprocess.Popen([*command, str(rank), str(size), str(directory)]) for rank in range(size)]
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * size
        return [torch.load(directory / f"size{size}-rank{rank}.pt") for rank in range(size)]

    def results(index):
        size = len(CASES[index]["tokens"])
        position = [i for i, case in enumerate(CASES) if len(case["tokens"]) == size].index(index)
        return [rank[position] for rank in run(size)]

    return results


@pytest.fixture(scope="module")
def whole_model(directory):
    """Logits and routes of tokens in the undivided model, by hooks on its routers."""

    def forward(family, tokens):
        model = AutoModelForCausalLM.from_pretrained(directory / family, dtype=torch.float32).eval()
        seen = {}
        watch(model, find_routers(model), lambda site, ids: seen.__setitem__(site, ids.clone()))
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits, torch.stack([seen[site] for site in sorted(seen)], dim=1), model

    return forward


def by_index(*indices):
    """Groups of four are for the full tier."""
    return pytest.mark.parametrize(
        "index",
        [pytest.param(i, marks=[pytest.mark.full] if len(CASES[i]["tokens"]) == 4 else []) for i in indices],
        ids=lambda i: "-".join(str(part) for part in (len(CASES[i]["tokens"]), *list(CASES[i].values())[:3])),
    )


@by_index(*range(len(CASES)))
def test_logits_and_routes_of_each_rank_are_those_of_the_whole_model(found, whole_model, index):
    case = CASES[index]
    for tokens, rank in zip(case["tokens"], found(index), strict=True):
        assert len(rank["logits"]) == len(rank["routes"]) == len(tokens)
        if tokens:
            logits, routes, _ = whole_model(case["family"], tokens)
            torch.testing.assert_close(rank["logits"], logits, atol=2e-5, rtol=1e-5)
            np.testing.assert_array_equal(rank["routes"], routes)


@by_index(0, len(CASES) - 1)
def test_a_rank_holds_its_share_of_the_experts_and_no_more(found, whole_model, index):
    case = CASES[index]
    *_, model = whole_model(case["family"], [1])
    whole = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    size = len(case["tokens"])
    assert [rank["expert_bytes"] for rank in found(index)] == [whole // size] * size
