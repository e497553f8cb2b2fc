"""SamplingParams: vLLM's names, bounds that hold when the object exists, and errors that say what to write instead."""

import pickle
import subprocess
import sys

import pytest
from pydantic import ValidationError

from rollout.config import EngineOptions
from rollout.sampling import SamplingParams


def test_the_defaults_are_those_of_vllm_except_for_random_seeds():
    assert SamplingParams().model_dump() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words": (),
        "logprobs": None,
        "prompt_logprobs": None,
    }


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("n", "pass num_samples= to sample"),
        ("best_of", "pass num_samples= to sample"),
        ("max_new_tokens", "it is called max_tokens"),
        ("do_sample", "temperature=0 is greedy"),
        ("temprature", "did you mean 'temperature'"),
        ("stop_tokens_ids", "did you mean 'stop_token_ids'"),
        ("zzz", "known: \\['allowed_token_ids', 'bad_words'"),
    ],
)
def test_an_unknown_key_is_named_with_what_to_write_instead(key, remedy):
    with pytest.raises(ValidationError, match=f"unknown SamplingParams key '{key}': .*{remedy}"):
        SamplingParams(**{key: 2})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2.5),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("stop_token_ids", ["a"]),
        ("stop", ["x", ""]),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("allowed_token_ids", []),
        ("bad_words", ["ok", " "]),
        ("bad_words", [()]),
        ("logprobs", -1),
        ("prompt_logprobs", -1),
    ],
)
def test_a_value_out_of_bounds_is_refused_naming_the_field_and_the_value(field, value):
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{field: value})
    (problem,) = caught.value.errors()
    assert problem["loc"][0] == field
    assert field in str(caught.value)
    assert str(problem["input"]) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.0),
        ("top_p", 1.0),
        ("top_p", 1e-6),
        ("top_k", -1),
        ("min_p", 1.0),
        ("max_tokens", 0),
        ("seed", 0),
        ("seed", 2**63 - 1),
    ],
)
def test_the_bounds_themselves_are_allowed(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_min_tokens_above_max_tokens_is_refused_with_both_values():
    with pytest.raises(ValidationError, match="min_tokens 5 is more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_prompt_logprobs_do_not_go_with_what_depends_on_sampled_tokens():
    for extra in ({"presence_penalty": 0.1}, {"bad_words": ((3,),)}):
        with pytest.raises(ValidationError, match="prompt_logprobs with penalties or bad_words"):
            SamplingParams(prompt_logprobs=0, **extra)


def test_one_stop_string_or_several():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
    assert SamplingParams(stop=None).stop == ()


def test_parameters_never_change_and_travel_by_pickle_and_json():
    params = SamplingParams(temperature=0.7, stop="ab", stop_token_ids=[3], seed=1, logit_bias={5: -1}, bad_words=["x"])
    with pytest.raises(ValidationError, match="frozen"):
        params.temperature = 1.0
    assert pickle.loads(pickle.dumps(params)) == params
    assert SamplingParams.model_validate_json(params.model_dump_json()) == params
    assert SamplingParams(**params.model_dump(mode="json")) == params
    assert hash(pickle.loads(pickle.dumps(params))) == hash(params) != hash(SamplingParams())


def test_engine_options_are_checked_the_same_way():
    with pytest.raises(
        ValidationError, match="unknown EngineOptions key 'max_batch_token': did you mean 'max_batch_tokens'"
    ):
        EngineOptions(max_batch_token=4)
    with pytest.raises(ValidationError, match="float64"):
        EngineOptions(dtype="float64")


def test_parameters_and_options_are_checked_without_torch():
    code = (
        "import sys, rollout.sampling, rollout.config; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
