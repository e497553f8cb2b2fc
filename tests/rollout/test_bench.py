"""`moe-rollout bench` runs, counts what it says, and refuses what it does not know. It asserts nothing on time."""

import importlib.util
import json

import pytest
from transformers import AutoModelForCausalLM

from rollout.__main__ import main
from rollout.bench import SHARES, Measured
from rollout.bench_tables import tables
from rollout.floor import weight_bytes_of_a_step


def bench(checkpoint, *options):
    arguments = ["bench", "--model", str(checkpoint("qwen3_moe")), "--prompt-len", "4", "--new-tokens", "3"]
    return main([*arguments, "--batches", "2", "--repeats", "1", *options])


@pytest.mark.parametrize("peers", ["generate", pytest.param("generate,generate_batch", marks=pytest.mark.full)])
def test_every_variant_and_peer_is_measured_in_each_round(checkpoint, capsys, peers):
    assert bench(checkpoint, "--peers", peers, "--json") == 0
    (rounds,) = json.loads(capsys.readouterr().out).values()
    variants = {"recording", "recording + dataset", "recording off", "overlap off", "batch_invariant"}
    assert [set(r) for r in rounds] == [variants | set(peers.split(","))]
    assert all(measured["tokens_per_second"] > 0 for measured in rounds[0].values())
    assert all(rounds[0][name]["first_token_ms"] > 0 for name in variants)
    shares = rounds[0]["recording"]["shares"]
    assert all(0 < shares[part] < 1 for part in SHARES)
    assert shares["model"] == max(shares[part] for part in SHARES if part != "wait")


def test_where_the_time_went_and_the_floor_are_tables(checkpoint, capsys):
    assert bench(checkpoint, "--peers", "", "--floor") == 0
    printed = capsys.readouterr().out
    assert "share of the time (they overlap)" in printed
    assert "floor of this machine" in printed
    assert "float32" in printed


def test_bytes_of_a_step_by_hand(checkpoint):
    """Two tokens hit 1 - (1 - K / E) ** 2 of the experts. The embedding is not read, the head is."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"))
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    config = model.config
    hit = 1 - (1 - config.num_experts_per_tok / config.num_experts) ** 2
    expected = sum(sizes.values()) - sizes["model.embed_tokens.weight"] - experts * (1 - hit)
    assert weight_bytes_of_a_step(model, batch=2) == pytest.approx(expected)
    assert 0 < experts * hit < experts


def test_medians_and_ratios_by_hand():
    rounds = [
        {"recording": Measured(90.0, 2.0, 5.0), "recording off": Measured(100.0)},
        {"recording": Measured(110.0, 4.0, 7.0), "recording off": Measured(100.0)},
        {"recording": Measured(80.0, 3.0, 6.0), "recording off": Measured(100.0)},
    ]
    (table,) = tables({"small B16": rounds})
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["recording", "recording off", "recording / recording off"]
    assert [column[0] for column in columns[1:]] == ["90", "80", "110", "3.0", "6.0"]
    assert [column[2] for column in columns[1:4]] == ["0.900", "0.800", "1.100"]


def test_an_unknown_peer_is_named(checkpoint, capsys):
    assert bench(checkpoint, "--peers", "tgi") == 1
    assert "peers ['tgi'] are unknown; choose among ['generate', 'generate_batch']" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed_is_named_before_anything_runs(checkpoint, capsys):
    assert bench(checkpoint, "--vllm") == 1
    assert "needs vLLM 0.30 or newer in this environment" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["tiny"])
def test_an_unknown_size_is_no_checkpoint(size, capsys):
    assert main(["bench", "--sizes", size]) == 1
    assert "'tiny'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--repeats", "0", "repeats has 0, need at least 1"),
        ("--threads", "-1", "threads has -1, need at least 1"),
        ("--batches", "4,0", "'0' is not a whole number from 1"),
        ("--batches", "", "batches is empty"),
    ],
)
def test_counts_below_1_are_refused_before_a_model_is_made(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", option, value]) == 1
    assert words in capsys.readouterr().err
