"""Prompts and completions as text: the shipped character model, and stop strings that end inside a byte-level token."""

from __future__ import annotations

import itertools

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rollout import RolloutClient, SamplingParams
from rollout.tiny_moe import MODEL_PATH, problems
from tests.rollout.oracle import Oracle, check_trace, mostly, tokens_agree

SUMS = [problem.prompt for problem in problems(24, seed=1, split="test")]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
CORPUS = [f"the {a} thing that {b} in other things stays the same thing" for a in "abcdefgh" for b in "stuvwxyz"]


@pytest.fixture(scope="module")
def tiny():
    """The engine in fp32, transformers in fp32, and the tokenizer."""
    with RolloutClient.local(MODEL_PATH, dtype="float32", max_batch_tokens=16) as client:
        yield client, Oracle(MODEL_PATH), AutoTokenizer.from_pretrained(MODEL_PATH)


def test_text_prompts_are_encoded_and_completions_decoded(tiny):
    client, oracle, tokenizer = tiny
    traces = client.sample(SUMS, sampling_params=GREEDY)
    for text, trace in zip(SUMS, traces, strict=True):
        prompt = tokenizer(text)["input_ids"]
        assert trace.prompt_ids == prompt
        assert tokens_agree(oracle, prompt, trace.completion_ids, oracle.greedy(prompt, 6))
        assert trace.text == tokenizer.decode(trace.completion_ids, skip_special_tokens=True)
        assert trace.text.isdigit()
        assert trace.completion_ids[-1] == tokenizer.eos_token_id
        assert trace.stop_reason is None
    assert mostly([check_trace(oracle, trace) for trace in traces])


def test_a_prompt_whose_answer_is_complete_ends_at_once(tiny):
    client, oracle, tokenizer = tiny
    answered = [f"{p.prompt}{p.answer}" for p in problems(4, seed=1, digits=1)]
    for trace in client.sample(answered, sampling_params=GREEDY):
        assert trace.completion_ids == [tokenizer.eos_token_id] == oracle.greedy(trace.prompt_ids, 6)
        assert (trace.text, trace.finish_reason) == ("", "stop")
        assert len(trace.routed_experts) == len(trace.prompt_ids)
        assert check_trace(oracle, trace)


@pytest.mark.parametrize("stop", ["1", "5", "67", ("7", "6")])
def test_a_stop_string_ends_the_completion(tiny, stop):
    client, oracle, tokenizer = tiny
    stops = (stop,) if isinstance(stop, str) else stop
    traces = client.sample(SUMS, sampling_params=SamplingParams(temperature=0, max_tokens=6, stop=stop))
    for trace in traces:
        whole = oracle.greedy(trace.prompt_ids, 6)
        wanted = shortest_with(tokenizer, whole, stops) or whole
        assert tokens_agree(oracle, trace.prompt_ids, trace.completion_ids, wanted)
        assert (trace.stop_reason in stops) == (wanted != whole or whole[-1] != tokenizer.eos_token_id)
        assert trace.text == cut(tokenizer.decode(wanted, skip_special_tokens=True), stops)
        assert check_trace(oracle, trace)
    assert any(trace.stop_reason in stops for trace in traces)


def shortest_with(tokenizer, completion, stops):
    """The shortest prefix whose whole decoded text holds one of `stops`, or None."""
    prefixes = (completion[:end] for end in range(1, len(completion) + 1))
    return next((ids for ids in prefixes if any(stop in tokenizer.decode(ids) for stop in stops)), None)


def cut(text, stops):
    """The text before the first stop string in it."""
    return min((text.partition(stop)[0] for stop in stops), key=len)


@pytest.fixture(scope="module")
def byte_level(checkpoint):
    """A random model whose byte-level tokens hold one or several letters: (client, oracle, tokenizer)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    path = checkpoint("qwen3_moe", vocab_size=tokenizer.get_vocab_size())
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)
    fast.save_pretrained(path)
    with RolloutClient.local(path) as client:
        yield client, Oracle(path), fast


def stop_inside_a_token(tokenizer, completion):
    """The last letter of one token and the first of a longer next one, or None."""
    texts = [tokenizer.decode([token]) for token in completion]
    pairs = itertools.pairwise(texts)
    found = (
        left[-1] + right[0]
        for left, right in pairs
        if (left + right).isalpha() and (left + right).isascii() and len(right) > 1
    )
    return next(found, None)


def test_a_stop_string_in_mid_token(byte_level):
    """The token that completes the string stays, the text is cut before the string, and every row is there."""
    client, oracle, tokenizer = byte_level
    params = SamplingParams(max_tokens=60, seed=0, ignore_eos=True)
    prompts = [[5, 6], [70], [80, 81, 82], [90] * 9] * 10
    plain = client.sample(prompts, sampling_params=params, step=0)
    stops = {at: stop_inside_a_token(tokenizer, trace.completion_ids) for at, trace in enumerate(plain)}
    chosen = [at for at, stop in stops.items() if stop]
    assert len(chosen) >= 4
    stopping = [params.model_copy(update={"stop": (stops[at],) if stops[at] else ()}) for at in range(len(plain))]
    traces = client.sample(prompts, sampling_params=stopping, step=0)
    for at in chosen:
        wanted = shortest_with(tokenizer, plain[at].completion_ids, (stops[at],))
        assert traces[at].completion_ids == wanted
        assert (traces[at].finish_reason, traces[at].stop_reason) == ("stop", stops[at])
        text = tokenizer.decode(wanted, skip_special_tokens=True)
        assert traces[at].text == text.partition(stops[at])[0]
    assert mostly([check_trace(oracle, trace) for trace in traces])
