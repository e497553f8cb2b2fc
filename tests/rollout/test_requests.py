"""From a call to requests: names of samples, and a refusal with an index before anything starts."""

import numpy as np
import pytest

from rollout.backend import ModelInfo
from rollout.requests import RequestBuilder
from rollout.sampling import SamplingParams
from storage import RoutingSpec

INFO = ModelInfo(
    spec=RoutingSpec.uniform(num_sites=1, num_experts=4, top_k=1),
    vocab_size=50,
    max_sequence_tokens=20,
    max_sequence_reason="the model's positions",
    tokenizer_path=None,
    captures_routes=True,
)
SHORT = SamplingParams(max_tokens=4, seed=0)


def tokenizer(prompt: str) -> dict[str, list[int]]:
    return {"input_ids": [ord(letter) - ord("a") for letter in prompt]}


class Words:
    """A tokenizer with a vocabulary of words; `_` stands for a leading space."""

    chat_template = "{{ messages }}"
    vocabulary = ("bad", "_bad", "very", "_very", "s", "_", "?", "!")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return {"bad": [0], " bad": [1], "very bad": [2, 1], " very bad": [3, 1], "s": [4], " s": [5, 4]}[text]

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        assert add_generation_prompt
        assert not return_dict
        if messages[0]["role"] == "tool":
            raise RuntimeError("no tools here")
        return [6 if message["role"] == "user" else 7 for message in messages]


def words_builder(template: bool = True) -> RequestBuilder:
    words = Words()
    words.chat_template = words.chat_template if template else None
    return RequestBuilder(builder().info, "run", lambda: words)


def builder(tokenizer_path: str | None = "somewhere", run: str = "run") -> RequestBuilder:
    info = ModelInfo(**{**vars(INFO), "tokenizer_path": tokenizer_path})
    return RequestBuilder(info, run, lambda: tokenizer)


def build(prompts, num_samples=1, params=SHORT, step=7, call=2, **arguments):
    return builder().check(prompts, num_samples, params, **arguments).requests(step, call)


def test_ids_are_run_step_prompt_key_and_j_in_prompt_order():
    requests = builder(run="lr3").check([[1], [2, 3]], 2, SHORT).requests(7, 2)
    assert [(r.sample_id, r.step, r.prompt_ids) for r in requests] == [
        ("lr3/7/2-0/0", 7, (1,)),
        ("lr3/7/2-0/1", 7, (1,)),
        ("lr3/7/2-1/0", 7, (2, 3)),
        ("lr3/7/2-1/1", 7, (2, 3)),
    ]


def test_the_callers_keys_take_the_place_of_call_and_index():
    requests = build([[1], [2]], prompt_keys=["gsm8k-17", "x"])
    assert [r.sample_id for r in requests] == ["run/7/gsm8k-17/0", "run/7/x/0"]


def test_strings_go_through_the_tokenizer_which_is_loaded_once():
    loads = []
    maker = RequestBuilder(builder().info, "run", lambda: loads.append(1) or tokenizer)
    requests = maker.check(["abc", [4, 5], "z"], 1, SHORT).requests(0, 0)
    assert [r.prompt_ids for r in requests] == [(0, 1, 2), (4, 5), (25,)]
    assert len(loads) == 1


def test_token_ids_alone_never_load_the_tokenizer():
    def fail():
        raise AssertionError("loaded")

    assert RequestBuilder(builder().info, "run", fail).check([[1]], 1, SHORT).requests(0, 0)[0].prompt_ids == (1,)


def test_numpy_tokens_become_python_integers():
    (request,) = build([np.array([3, 4], np.uint16)])
    assert request.prompt_ids == (3, 4)
    assert {type(token) for token in request.prompt_ids} == {int}


def test_parameters_and_metadata_are_one_for_all_or_one_per_prompt():
    other = SamplingParams(max_tokens=1, seed=9)
    requests = build([[1], [2]], 2, [SHORT, other], metadata=[{"answer": "12"}, {}])
    assert [r.sampling_params for r in requests] == [SHORT, SHORT, other, other]
    assert [r.metadata for r in requests] == [{"answer": "12"}] * 2 + [{}] * 2
    assert [r.metadata for r in build([[1], [2]], metadata={"task": "sum"})] == [{"task": "sum"}] * 2
    assert build([[1]], params=None)[0].sampling_params.model_copy(update={"seed": None}) == SamplingParams()


def test_a_seed_is_drawn_once_per_call_and_only_where_none_was_given():
    """Drawn before the requests are spread, so that a retry on another actor continues the same streams."""
    params = [SamplingParams(temperature=0.5), SHORT, SamplingParams()]
    seeds, again = ([r.sampling_params.seed for r in build([[1], [2], [3]], 2, params)] for _ in range(2))
    assert seeds[2:4] == again[2:4] == [0, 0]
    assert len({*seeds[:2], *seeds[4:]}) == 1
    assert seeds[0] != again[0]
    assert [r.sampling_params.temperature for r in build([[1]], params=params[:1])] == [0.5]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty; it needs at least one token"),
        ("", "prompt 1 is empty; it needs at least one token"),
        ([3, 50], r"prompt 1 has token id 50, outside the vocabulary \[0, 50\)"),
        ([-1], r"prompt 1 has token id -1, outside the vocabulary \[0, 50\)"),
        (
            [1] * 17,
            r"prompt 1: 17 prompt tokens \+ max_tokens 4 = 21 exceed 20 \(the model's positions\); shorten the prompt",
        ),
        (5, "prompt 1 is 5, need a string or a list of token ids"),
        (None, "prompt 1 is None, need a string or a list"),
        ([1, "2"], r"prompt 1 is \[1, '2'\], need a string or a list of token ids"),
        ([1.5], r"prompt 1 is \[1.5\], need a string or a list of token ids"),
        ([[1]], r"prompt 1 is \[\[1\]\], need a string or a list of token ids"),
        (b"abc", "prompt 1 is b'abc', need a string or a list of token ids"),
    ],
    ids=repr,
)
def test_a_bad_prompt_is_named_by_its_index(prompt, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build([[1], prompt, [2]])


def test_a_sequence_that_just_fits_is_accepted():
    assert len(build([[1] * 16])[0].prompt_ids) == 16


def test_a_stop_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="stop_token_ids of prompt 1 has token id 99, outside"):
        build([[1], [2]], params=[SHORT, SamplingParams(stop_token_ids=(99,))])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", (1, 99)),
        ("logit_bias", {99: 1.0}),
        ("bad_words", ((1, 99),)),
    ],
)
def test_every_token_id_of_the_parameters_is_checked(name, value):
    with pytest.raises(ValueError, match=f"{name} of prompt 1 has token id 99, outside"):
        build([[1], [2]], params=[SHORT, SamplingParams(**{name: value})])


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_alternatives_than_the_vocabulary_has_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} of prompt 0 is 51, the vocabulary has 50"):
        build([[1]], params=SamplingParams(**{name: 51}))


def test_bad_words_become_token_ids_with_and_without_a_space_before_them():
    """As in vLLM: the spaced spelling counts when it is another first token and no longer."""
    params = SamplingParams(bad_words=("bad", "very bad", " s", (9, 8)))
    (request,) = words_builder().check([[1]], 1, params).requests(0, 0)
    assert request.bad_word_ids == ((0,), (1,), (2, 1), (3, 1), (4,), (9, 8))


def test_messages_become_token_ids_by_the_chat_template():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    requests = words_builder().check([talk, [3, 4]], 1, SHORT).requests(0, 0)
    assert [r.prompt_ids for r in requests] == [(6, 7), (3, 4)]


def test_messages_without_a_chat_template_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="prompt 1 is a list of messages and this checkpoint's tokenizer has no chat"):
        words_builder(template=False).check([[1], [{"role": "user", "content": "a"}]], 1, SHORT)


def test_what_a_chat_template_refuses_is_named_by_its_index():
    with pytest.raises(ValueError, match=r"prompt 0: the chat template refused .*no tools here"):
        words_builder().check([[{"role": "tool"}]], 1, SHORT)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("abc", SHORT),
        ([1], SamplingParams(max_tokens=1, stop="x")),
        ([1], SamplingParams(bad_words=("x",))),
        ([{"role": "user", "content": "a"}], SHORT),
    ],
)
def test_text_without_a_tokenizer_is_refused_with_the_way_out(prompt, params):
    with pytest.raises(ValueError, match="prompt 0 needs a tokenizer and this checkpoint ships none; pass token ids"):
        builder(tokenizer_path=None).check([prompt], 1, params).requests(0, 0)


@pytest.mark.parametrize("prompts", ["abc", [], None, 5, {"a": 1}], ids=repr)
def test_prompts_must_be_a_non_empty_list(prompts):
    with pytest.raises(TypeError, match="prompts must be a non-empty list of strings or token id lists"):
        build(prompts)


@pytest.mark.parametrize("num_samples", [0, -3])
def test_at_least_one_sample(num_samples):
    with pytest.raises(ValueError, match=f"num_samples is {num_samples}, need an integer of at least 1"):
        build([[1]], num_samples)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a"], "prompt_keys must be 2 different strings, one per prompt, got 1"),
        (["a", "a"], "prompt_keys must be 2 different strings, one per prompt, got 1"),
        (["a", "b/c"], "prompt key 'b/c' is empty, has a '/'"),
        (["", "b"], "prompt key '' is empty"),
    ],
)
def test_keys_must_name_samples_uniquely(keys, message):
    with pytest.raises(ValueError, match=message):
        build([[1], [2]], prompt_keys=keys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"params": [SHORT]}, "sampling_params must be one SamplingParams or a list of 2, one per prompt"),
        ({"params": [{"max_tokens": 3}] * 2}, "sampling_params must be one SamplingParams or a list of 2"),
        ({"params": {"max_tokens": 3}}, "sampling_params must be one SamplingParams or a list of 2"),
        ({"params": 5}, "sampling_params must be one SamplingParams or a list of 2"),
        ({"params": []}, "sampling_params must be one SamplingParams or a list of 2"),
        ({"metadata": [{}]}, "metadata must be one dict or a list of 2"),
        ({"metadata": ["x", "y"]}, "metadata must be one dict or a list of 2"),
    ],
    ids=str,
)
def test_one_value_per_prompt_or_one_for_all(arguments, message):
    with pytest.raises(ValueError, match=message):
        build([[1], [2]], **arguments)
