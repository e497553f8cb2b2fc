"""Rewards read the text: it is that of the tokens, whatever engine drew them."""

from __future__ import annotations

import numpy as np
import pytest

from rollout import RolloutClient, SamplingParams
from rollout.backend import SampleRequest
from rollout.engine_model import describe_model
from rollout.engine_reply import EngineReply, trace_of
from rollout.tiny_moe import MODEL_PATH, exact_match
from tests.engines.conftest import ENGINES
from tests.engines.fakes import FakeVllm

TINY = (8, 2, 16, 15)  # layers, experts per token, experts, token ids


def test_text_and_rewards_are_those_of_the_tokens(engine: str):
    server = ENGINES[engine][0](shape=TINY)
    options = {"backend": engine.partition("-")[0], "model": MODEL_PATH, **ENGINES[engine][1]}
    tokenizer = describe_model(str(MODEL_PATH)).tokenizer
    decoded: list[str] = []

    def reward(trace) -> float:
        decoded.append(tokenizer.decode(trace.completion_ids, skip_special_tokens=True))
        return exact_match(trace.text, decoded[-1])

    with RolloutClient.connect(server.url, reward_fn=reward, **options) as client:
        traces = client.sample(["12+34="], num_samples=4, sampling_params=SamplingParams(max_tokens=6, seed=0))
    server.stop()
    assert [trace.reward for trace in traces] == [1.0] * 4
    assert any(decoded)


def test_stop_strings_go_to_completions_and_their_name_comes_back():
    server = FakeVllm(shape=TINY)

    def stopped(prompt, body):
        body["choices"][0] |= {"finish_reason": "stop", "stop_reason": ";"}
        return body

    params = SamplingParams(max_tokens=6, seed=0, stop=";", ignore_eos=True)
    with RolloutClient.connect(server.url, backend="vllm", model=MODEL_PATH, api="completions") as client:
        server.spoil = stopped
        (trace,) = client.sample(["12+34="], sampling_params=params)
        assert [body.get("stop") for path, body, _ in server.seen if path == "/v1/completions"][-1] == [";"]
    assert (trace.finish_reason, trace.stop_reason) == ("stop", ";")
    with RolloutClient.connect(server.url, backend="vllm", model=MODEL_PATH) as client:
        with pytest.raises(ValueError, match=r"cannot do stop=.*generate has no tokenizer; use api='completions'"):
            client.sample(["12+34="], sampling_params=params)
    server.stop()


@pytest.mark.parametrize(("stop_reason", "text"), [(None, "12+3"), ("+", "12"), (4, "12+3")])
def test_the_text_ends_before_the_stop_string_that_ended_it(stop_reason, text):
    model = describe_model(str(MODEL_PATH))
    ids = model.tokenizer.encode("12+3" if stop_reason != "+" else "12+", add_special_tokens=False)
    request = SampleRequest("run/0/0/0", 0, (5,), SamplingParams(seed=0))
    layers = [[[0, 1]] * 8] * len(ids)
    reply = EngineReply(ids, ids, [-1.0] * len(ids), np.array(layers), "stop", stop_reason)
    assert trace_of(request, reply, model, 0).text == text
