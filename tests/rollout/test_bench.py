"""`moe-rollout bench` runs, counts what it says, and refuses what it does not know. It asserts nothing on time."""

import contextlib
import datetime
import gc
import importlib.util
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout import bench as bench_module
from rollout import floor as floor_module
from rollout.__main__ import main
from rollout.bench import BenchOptions, Case, run_bench
from rollout.bench_peers import PEERS, open_peer
from rollout.bench_tables import from_json, ratios, tables, to_json
from rollout.bench_variants import SHARES, Measured, Variant, check_traces, step_times
from rollout.engine_stats import StepEvent
from rollout.floor import CaseFloor, Floor, attention_of, prefill_flops, weight_bytes_of_a_step
from storage import Trace
from tests.bench.readme_table import HEADER, README, TABLE, rewritten

SHORT = {
    "completion_ids": [9],
    "logprobs": np.zeros(1, np.float32),
    "routed_experts": np.zeros((2, 1, 1), np.uint8),
}
OURS = ("recording", "recording + dataset", "recording off", "overlap off", "batch_invariant")


def bench(checkpoint, *options):
    arguments = ["bench", "--model", str(checkpoint("qwen3_moe")), "--prompt-len", "4", "--new-tokens", "3"]
    return main([*arguments, "--batches", "2", "--repeats", "1", *options])


@pytest.mark.parametrize("peers", ["generate", pytest.param("generate,generate_batch", marks=pytest.mark.full)])
def test_every_variant_and_peer_is_measured_in_each_round(checkpoint, capsys, monkeypatch, peers):
    monkeypatch.setattr(floor_module, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(floor_module, "GEMM_SIZE", 64)
    monkeypatch.setattr(gc, "collect", lambda: 0)  # over the heap of a whole test run it takes long
    assert bench(checkpoint, "--peers", peers, "--threads", "1", "--floor", "--json") == 0
    (case,) = json.loads(capsys.readouterr().out).values()
    names = {*OURS, *peers.split(",")}
    assert [set(r) for r in case["rounds"]] == [names]
    assert case["threads"] == dict.fromkeys(names, 1)
    assert set(case["megabytes"]) == names
    assert max(case["megabytes"].values()) < case["peak_megabytes"]
    (measured,) = case["rounds"]
    assert all(of["tokens_per_second"] > 0 for of in measured.values())
    assert all(0 < measured[name]["first_token_ms"] <= measured[name]["prefill_ms"] for name in OURS)
    assert all(measured[name]["decode_ms"] > 0 for name in OURS)
    always = [part for part in SHARES[:7] if part != "capture"]
    assert all(0 < measured[name]["shares"][part] < 1 for name in OURS for part in always)
    assert measured["recording off"]["shares"]["capture"] == 0 < measured["recording"]["shares"]["capture"]
    assert measured["recording"]["shares"]["commit"] == 0 < measured["recording + dataset"]["shares"]["commit"]
    assert case["floor"]["decode_share"] > 0
    assert case["floor"]["prefill_share"] > 0


def fake(family, rates, log, most_threads=None):
    """A variant that samples `rates[threads]` tokens per second and notes what it is told."""

    @contextlib.contextmanager
    def start(threads):
        def run(number, new_tokens):
            log.append((family, threads, number, new_tokens))
            return Measured(rates[threads])

        yield run

    return Variant(family, start, most_threads)


@pytest.fixture
def fakes(monkeypatch):
    """`fakes(log)`: variants of two families; without the real ones' memory, which takes long to measure."""
    monkeypatch.setattr(bench_module, "resident_bytes", lambda: None)
    monkeypatch.setattr(bench_module, "vocab_size_of", lambda path: 38)
    return make_fakes


def make_fakes(log):
    ours = {1: 10.0, 2: 5.0, 4: 20.0}
    return {
        "recording": fake("ours", ours, log),
        "batch_invariant": fake("invariant of ours", ours, log, most_threads=2)._replace(family="ours"),
        "generate": fake("generate", {1: 3.0, 2: 9.0, 4: 8.0}, log),
    }


def test_each_family_keeps_its_fastest_number_of_threads_and_rounds_begin_with_another_variant(fakes, monkeypatch):
    log = []
    monkeypatch.setattr(bench_module, "variants_of", lambda *_: fakes(log))
    options = BenchOptions(models=["x"], batches=[2], new_tokens=12, repeats=4, threads=[1, 2, 4])
    (case,) = run_bench(options).values()
    assert case.threads == {"recording": 4, "batch_invariant": 2, "generate": 2}
    assert [r["generate"].tokens_per_second for r in case.rounds] == [9.0] * 4
    tried = [entry[1:] for entry in log if entry[0] == "ours"][:6]
    assert tried == [(count, 0, tokens) for count in (1, 2, 4) for tokens in (8, 12)]
    counted = [family for family, _, number, _ in log if number]
    first = ["invariant of ours", "generate", "ours"]
    assert counted == [*first, *first[1:], first[0], first[2], *first[:2], *first]


def test_models_of_one_name_keep_their_own_results_and_datasets(fakes, monkeypatch):
    seen = []
    monkeypatch.setattr(bench_module, "variants_of", lambda *given: seen.append(given) or fakes([]))
    results = run_bench(BenchOptions(models=["a/ckpt", "b/ckpt", "c"], batches=[2, 3], repeats=1, threads=[1]))
    assert list(results) == [f"{name} B{batch}" for name in ("a/ckpt", "b/ckpt", "c") for batch in (2, 3)]
    assert {token for _, prompts, *_ in seen for prompt in prompts for token in prompt} <= set(range(2, 38))
    assert [path for path, *_ in seen] == ["a/ckpt", "a/ckpt", "b/ckpt", "b/ckpt", "c", "c"]
    assert len({traces for *_, traces in seen}) == 6


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_draws_from_the_whole_vocabulary_and_does_not_stop(checkpoint, peer):
    """Of transformers' 50 likeliest tokens, 200 first tokens of one prompt hold 50 at most. The end token is drawn too,
    in the middle of completions, which neither end there nor avoid it."""
    eos = 7
    with open_peer(peer, str(checkpoint("qwen3_moe", eos_token_id=eos, initializer_range=0.02)), "cpu") as generate:
        made = generate([[5, 6, 9]] * 200, 4, 0)
    assert [len(tokens) for tokens in made] == [4] * 200
    assert len({tokens[0] for tokens in made}) > 70
    after = [tokens[tokens.index(eos) + 1] for tokens in made if eos in tokens[:-1]]
    assert len(set(after)) > 1


def trace(**changes):
    whole = {
        "sample_id": "run/0/0/0",
        "step": 0,
        "prompt_ids": [5, 7],
        "completion_ids": [9, 2],
        "logprobs": np.zeros(2, np.float32),
        "routed_experts": np.zeros((3, 1, 1), np.uint8),
        "finish_reason": "length",
    }
    return Trace(**(whole | changes))


def test_a_round_counts_only_when_every_trace_is_whole():
    check_traces("the engine", [trace(), trace()], 2, 2, recording=True)
    check_traces("the engine", [trace(routed_experts=None)], 1, 2, recording=False)


@pytest.mark.parametrize(
    ("changes", "recording", "words"),
    [
        ({"error": "it broke"}, True, "the engine failed in run/0/0/0: it broke"),
        (SHORT, True, r"completions of \[2, 1\] tokens, need 2 of 2"),
        ({"routed_experts": None}, True, "recorded 0 rows of run/0/0/0, need 3"),
        ({"routed_experts": np.zeros((2, 1, 1), np.uint8), "route_start": 1}, True, "recorded 2 rows"),
        ({"route_valid": np.array([True, False, True])}, True, "all of them valid"),
        ({}, False, "recorded 3 rows of run/0/0/0, need 0"),
    ],
)
def test_a_trace_that_lacks_something_ends_the_benchmark(changes, recording, words):
    first = trace() if recording else trace(routed_experts=None)
    with pytest.raises(RuntimeError, match=words):
        check_traces("the engine", [first, trace(**changes)], 2, 2, recording)


def test_a_trace_too_few_ends_the_benchmark():
    with pytest.raises(RuntimeError, match=r"completions of \[2\] tokens, need 2 of 2"):
        check_traces("the engine", [trace()], 2, 2, recording=True)


def test_prefill_ends_with_the_last_step_that_holds_a_prompt():
    """Two sequences: prompts in steps 7 and 8, the second beside a decode; then three decodes."""
    launches = [StepEvent("launch", step, 0.0, tokens) for step, tokens in enumerate([30, 11, 2, 2, 2], 7)]
    ends = [StepEvent("finalize", step, at, 0) for step, at in enumerate([1.25, 1.5, 1.625, 1.6875, 1.9375], 7)]
    assert step_times([*launches, *ends], 1.0, batch=2) == (500.0, 125.0)
    assert step_times(ends, 1.0, batch=2) == (None, None)


def test_what_was_measured_is_tables(checkpoint, capsys, monkeypatch):
    floor = CaseFloor(Floor(read=10e9, flops=100e9), "float32", 2, step_bytes=20e6, prefill_flops=30e9)
    measured = Measured(90.0, 2.0, 5.0, dict.fromkeys(SHARES, 0.25), 600.0, 4.0)
    results = {"small B16": Case([{"recording": measured}], {"recording": 2}, {"recording": 7.0}, 99.0, floor)}
    monkeypatch.setattr(bench_module, "run_bench", lambda options: results)
    assert bench(checkpoint, "--peers", "", "--floor") == 0
    printed = capsys.readouterr().out
    assert "99 MB at most in this process" in printed
    assert "% of the time (they overlap)" in printed
    *_, decode, prefill = tables(results)
    cells = [[next(iter(column.cells)) for column in table.columns] for table in (decode, prefill)]
    assert cells[0] == ["small B16", "float32", "2", "10.0", "20.0", "2.0", "4.0", "50%"]
    assert cells[1] == ["small B16", "float32", "2", "100.0", "30.0", "300.0", "600.0", "50%"]
    found = to_json(results)["small B16"]
    assert (found["floor"]["decode_share"], found["floor"]["prefill_share"]) == (0.5, 0.5)
    assert from_json(json.loads(json.dumps(found))) == results["small B16"]._replace(floor=None)


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


def test_operations_of_a_prefill_are_those_that_torch_counts(checkpoint):
    """torch's counter sees attention over all pairs, we count those of a causal mask; a token picks K experts."""
    from torch.utils.flop_counter import FlopCounterMode

    plain = {"experts_implementation": "eager", "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3_moe"), **plain)
    config, length = model.config, 12
    attention = attention_of(model)
    width = config.num_key_value_heads * config.head_dim
    assert attention.token_bytes == config.num_hidden_layers * 2 * width * 4
    assert attention.pair_flops == config.num_hidden_layers * config.num_attention_heads * config.head_dim * 4
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(3, 3 + length)[None], use_cache=False, logits_to_keep=1)
    pairs_above = length * (length - 1) / 2
    counted = counter.get_total_flops() - attention.pair_flops * pairs_above
    assert prefill_flops(model, [length, length]) == 2 * counted


def test_medians_and_ratios_by_hand():
    rounds = [
        {"recording": Measured(90.0, 2.0, 5.0), "recording off": Measured(100.0), "generate": Measured(45.0)},
        {"recording": Measured(110.0, 4.0, 7.0), "recording off": Measured(100.0), "generate": Measured(55.0)},
        {"recording": Measured(80.0, 3.0, 6.0), "recording off": Measured(100.0), "generate": Measured(20.0)},
    ]
    for r in rounds:
        r["vLLM, recording"] = Measured(50.0)
    case = Case(rounds, dict.fromkeys(rounds[0], 2), dict.fromkeys(rounds[0]) | {"recording": 31.4}, 200.0)
    medians, found = tables({"small B16": case})
    columns = [list(column.cells) for column in medians.columns]
    assert columns[0] == ["recording", "recording off", "generate", "vLLM, recording"]
    assert [column[0] for column in columns[1:]] == ["2", "90", "80", "110", "3.0", "6.0", "31"]
    assert [column[1] for column in columns[5:]] == ["", "", ""]
    columns = [list(column.cells) for column in found.columns]
    assert columns[0] == [f"recording / {of}" for of in rounds[0] if of != "recording"] + [
        "recording / best peer (vLLM, recording)"
    ]
    assert [column[0] for column in columns[1:]] == ["0.900", "0.800", "1.100"]
    assert ratios(case)["recording / best peer (vLLM, recording)"] == [1.8, 2.2, 1.6]


def test_the_readme_has_the_table_that_its_script_writes():
    """The same columns; a new run changes the table and the line above it, and nothing else."""
    before = README.read_text()
    (old,) = TABLE.findall(before)
    assert old[1].splitlines()[0] == HEADER
    assert {line.count("|") for line in old[1].splitlines()} == {HEADER.count("|")}
    rounds = [
        {"recording": Measured(rate), "recording off": Measured(100.0), "vLLM, recording": Measured(50.0)}
        for rate in (90.0, 110.0, 80.0)
    ]
    case = Case(rounds, {"recording": 1, "recording off": 1, "vLLM, recording": 2}, {}, 0.0)
    after = rewritten(before, {"mid B16": case}, "a machine", datetime.date(2027, 1, 2))
    (new,) = TABLE.findall(after)
    assert new[0] == "<!-- bench: 3 rounds on a machine, 2027-01-02 -->\n"
    ours, vllm = "0.90 (0.80-1.10)", "1.80 (1.60-2.20)"
    assert new[1].splitlines()[2:] == [f"| mid B16 | 90 | {ours} |  |  |  |  |  | {vllm} | 1, 2 |"]
    assert after.replace("".join(new), "") == before.replace("".join(old), "")


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
        ("--threads", "-1", "'-1' is not a whole number from 1"),
        ("--threads", ",", "threads is empty"),
        ("--batches", "4,0", "'0' is not a whole number from 1"),
        ("--batches", "", "batches is empty"),
        ("--batches", "4,4", "batches names one of [4, 4] twice"),
        ("--sizes", "small,small", "models names one of ['small', 'small'] twice"),
    ],
)
def test_counts_below_1_and_doubles_are_refused_before_a_model_is_made(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", option, value]) == 1
    assert words in capsys.readouterr().err


def test_what_engines_print_stays_out_of_the_json(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("rollout.bench.run_bench", lambda options: print("INFO loading") or {})
    assert main(["bench", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {}
    assert "INFO loading" in err
