"""The shipped model: small, about half right on sums it never saw, and only by the experts it chooses."""

import math
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollout.tiny_moe import MAX_ANSWER_TOKENS, MODEL_PATH, Problem, exact_match, problems

TEST_SEED = 2
HELD_OUT = problems(300, TEST_SEED, split="test")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_PATH, local_files_only=True)


@pytest.fixture
def model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.bfloat16, local_files_only=True)


def routers(model):
    return [layer.mlp.gate for layer in model.model.layers]


@torch.inference_mode()
def greedy_accuracy(model, tokenizer):
    inputs = tokenizer([p.prompt for p in HELD_OUT], padding=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(exact_match(text, p.answer) for text, p in zip(texts, HELD_OUT, strict=True)) / len(HELD_OUT)


def add_chosen(count, _router, _args, out):
    count.update(out[2].flatten().tolist())


@torch.inference_mode()
def routes_per_site(model, tokenizer):
    """Count of each expert at each site while the model reads the held-out sums with their right answers."""
    counts = [Counter() for _ in routers(model)]
    for router, count in zip(routers(model), counts, strict=True):
        router.register_forward_hook(partial(add_chosen, count))
    for p in HELD_OUT:
        model(**tokenizer(p.prompt + p.answer, return_tensors="pt"))
    return counts


def load_entropy(count, num_experts):
    """Entropy of the shares over log E: 1 when all experts get the same load, 0 when one gets everything."""
    shares = [n / count.total() for n in count.values()]
    return -sum(s * math.log(s) for s in shares) / math.log(num_experts)


def force_random_experts(router, generator):
    """Replace the chosen experts by distinct random ones; the weights of the slots stay."""
    chosen = router.forward

    def forward(hidden):
        logits, weights, ids = chosen(hidden)
        return logits, weights, torch.rand(logits.shape, generator=generator).topk(ids.shape[1]).indices

    router.forward = forward


def test_the_weights_fit_in_two_megabytes():
    assert (MODEL_PATH / "model.safetensors").stat().st_size <= 2_000_000


def test_the_architecture_is_the_documented_one(model):
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("qwen3_moe", 8, 64)
    assert (config.num_experts, config.num_experts_per_tok) == (16, 2)
    assert 850_000 < model.num_parameters() < 950_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_greedy_answers_to_held_out_sums_are_right_about_half_the_time(model, tokenizer):
    assert 0.40 <= greedy_accuracy(model, tokenizer) <= 0.70


def test_accuracy_collapses_when_random_experts_are_forced(model, tokenizer):
    native = greedy_accuracy(model, tokenizer)
    generator = torch.Generator().manual_seed(0)
    for router in routers(model):
        force_random_experts(router, generator)
    assert greedy_accuracy(model, tokenizer) < native / 2


def test_every_site_is_used_and_experts_are_specialised(model, tokenizer):
    counts = routes_per_site(model, tokenizer)
    tokens = sum(len(p.prompt + p.answer) for p in HELD_OUT)
    assert [count.total() for count in counts] == [2 * tokens] * 8
    assert all(len(count) >= 8 for count in counts), "a site uses less than half of its experts"
    assert min(load_entropy(count, 16) for count in counts) < 0.9


def test_the_route_depends_on_the_token(model, tokenizer):
    """At the first site each character has a favourite: that expert comes first in most cases."""
    first = {token: Counter() for token in range(model.config.vocab_size)}
    ids = [tokenizer.encode(p.prompt) for p in HELD_OUT]
    for prompt in ids:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), output_router_logits=True).router_logits[0]
        for token, expert in zip(prompt, logits.argmax(-1).tolist(), strict=True):
            first[token][expert] += 1
    favourite = sum(max(count.values()) for count in first.values() if count)
    assert favourite / sum(map(len, ids)) > 0.5


def test_the_tokenizer_round_trips_one_token_per_character(tokenizer):
    ids = tokenizer.encode("0123456789+=")
    assert ids == list(range(3, 15))
    assert tokenizer.decode(ids) == "0123456789+="
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "0123456789+="
    assert tokenizer.decode(tokenizer.encode("7 x")) == "7<unk><unk>"


def test_special_tokens_agree_between_model_and_tokenizer(model, tokenizer):
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.eos_token_id) == (0, 1)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.padding_side) == (0, 1, "left")
    assert len(tokenizer) == model.config.vocab_size == 15


def test_problems_are_sums_and_the_same_for_the_same_seed():
    drawn = problems(200, seed=5)
    assert drawn == problems(200, seed=5) != problems(200, seed=6)
    assert drawn[:50] == problems(50, seed=5)
    for prompt, answer in drawn:
        a, b = prompt.removesuffix("=").split("+")
        assert int(a) + int(b) == int(answer)
        assert max(len(a), len(b)) <= 3
    assert all(len(p.prompt) == 4 for p in problems(50, seed=5, digits=1))


def test_the_known_first_problems():
    """Frozen values: another generator or hash would silently move problems between the splits."""
    assert problems(2, seed=1, split="test") == [Problem("6+85=", "91"), Problem("664+6=", "670")]


def test_splits_are_disjoint_also_by_mirror_image():
    def pairs(split):
        return {frozenset(p.prompt[:-1].split("+")) for p in problems(20_000, seed=3, split=split)}

    assert not pairs("train") & pairs("test")


def test_about_one_pair_in_ten_is_held_out():
    every = {f"{a}+{b}=" for a in range(100) for b in range(100)}
    trained = {p.prompt for p in problems(300_000, seed=4, digits=2)}
    assert 0.08 < len(every - trained) / len(every) < 0.12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": -1, "seed": 0}, "n is -1"),
        ({"n": 1, "seed": 0, "digits": 0}, "digits is 0"),
        ({"n": 1, "seed": 0, "split": "valid"}, "split 'valid' is unknown"),
    ],
)
def test_impossible_requests_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        problems(**arguments)


@pytest.mark.parametrize(("text", "score"), [("55", 1.0), ("055", 0.0), ("55<eos>", 0.0), ("", 0.0), (None, 0.0)])
def test_exact_match_wants_every_character(text, score):
    assert exact_match(text, "55") == score


def test_the_helpers_import_no_torch():
    helpers = str(MODEL_PATH / "__init__.py")
    code = f"import runpy, sys; runpy.run_path({helpers!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
