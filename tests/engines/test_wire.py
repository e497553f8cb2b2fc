"""Recorded vLLM 0.30 replies and SGLang 0.5.23 ones in the shapes of its source, decoded; bad ones refused by name."""

from __future__ import annotations

import base64
import copy
import json

import numpy as np
import pytest

from rollout import SamplingParams
from rollout.backend import SampleRequest
from rollout.engine_model import EngineModel
from rollout.engine_reply import trace_of
from rollout.engine_versions import check_version
from rollout.http_engine import HttpEngine, error_text
from rollout.sglang_wire import sglang_payload, sglang_reply
from rollout.vllm_wire import completions_body, generate_body, vllm_reply
from storage import RoutingSpec, Trace, validate_trace
from tests.engines.fakes import SGLANG, VLLM

SPEC = RoutingSpec.uniform(num_sites=8, num_experts=32, top_k=4)
MODEL = EngineModel("m", SPEC, 4096, 512, num_layers=8, model=None)
PROMPT = tuple(range(2, 14))


def request(prompt=PROMPT, **params) -> SampleRequest:
    return SampleRequest("run/0/0-0/0", 0, prompt, SamplingParams(**({"seed": 3, "max_tokens": 4} | params)))


def one(body, index=0):
    """A recorded reply with n = 2 as the reply of one sequence."""
    return body | {"choices": [body["choices"][index]]}


def test_a_recorded_vllm_reply_becomes_a_trace():
    reply = vllm_reply(request(), one(VLLM["generate"]), version=0)
    trace = trace_of(request(), reply, MODEL, 0)
    assert trace.completion_ids == [2240, 2299, 2954, 1453]
    assert trace.logprobs == pytest.approx([-8.387947, -7.664768, -8.072299, -8.423258], abs=1e-6)
    assert trace.routed_experts.shape == (12 + 4 - 1, 8, 4)
    assert trace.routed_experts[0, 0].tolist() == [4, 1, 2, 17]  # the bytes behind the npy header
    assert trace.routed_experts.dtype == np.uint8
    assert trace.weight_versions == [(0, 0, 15)]


def test_both_vllm_endpoints_recorded_the_same_sequence():
    generate = vllm_reply(request(), one(VLLM["generate"]), 0)
    completions = vllm_reply(request(), one(VLLM["completions_n2"]), 0)
    assert completions.output_ids == generate.output_ids
    assert completions.logprobs == pytest.approx(generate.logprobs, abs=1e-6)
    assert np.array_equal(completions.layers, generate.layers)


def test_a_recorded_abort_has_the_rows_of_its_28_tokens():
    trace = trace_of(request(max_tokens=480), vllm_reply(request(), VLLM["generate_aborted_ok"], 0), MODEL, 0)
    assert trace.finish_reason == "abort"
    assert trace.route_len == 12 + 28 - 1


def test_the_vllm_bodies_have_the_keys_that_were_accepted_when_recorded():
    assert generate_body(request(), "rx-1", "tiny").keys() == VLLM["generate_request"].keys()
    filters = {"top_p", "top_k", "min_p", "repetition_penalty"}
    asked = VLLM["generate_request"]["sampling_params"].keys() | filters
    assert generate_body(request(top_p=0.9, ignore_eos=True), "rx-1", "tiny")["sampling_params"].keys() <= asked
    assert completions_body(request(ignore_eos=True), "tiny").keys() <= VLLM["completions_request"].keys() | filters


@pytest.mark.parametrize(
    "said",
    [
        completions_body(request(), "tiny"),
        generate_body(request(), "rx-1", "tiny")["sampling_params"],
        sglang_payload(request(), "rx-1")["sampling_params"],
    ],
)
def test_filters_that_are_off_are_said_to_be_off_since_servers_fill_what_is_left_out(said):
    assert (said["temperature"], said["top_p"], said["min_p"], said["repetition_penalty"]) == (1, 1, 0, 1)
    assert said["top_k"] in (0, -1)
    assert completions_body(request(top_k=5, repetition_penalty=1.5), "tiny")["top_k"] == 5


def test_samples_of_one_prompt_and_equal_samples_of_two_prompts_have_seeds_of_their_own():
    requests = [SampleRequest(f"run/0/{p}/{j}", 0, PROMPT, SamplingParams(seed=3)) for p in "ab" for j in range(2)]
    assert len({generate_body(r, "rx", "m")["sampling_params"]["seed"] for r in requests}) == 4
    seeds = {sglang_payload(r, "rx")["sampling_params"]["sampling_seed"] for r in requests}
    assert len(seeds) == 4
    assert max(seeds) < 2**31


def test_an_sglang_reply_becomes_a_trace_of_int32_rows_narrowed():
    reply = sglang_reply(request(), SGLANG["aborted_running"], MODEL)
    trace = trace_of(request(), reply, MODEL, 0)
    raw = (
        np.frombuffer(base64.b64decode(SGLANG["aborted_running"]["meta_info"]["routed_experts"]), np.int32)
        if "routed_experts" in SGLANG["aborted_running"]["meta_info"]
        else None
    )
    rows = len(trace.token_ids) - 1
    assert trace.finish_reason == "abort"
    assert trace.routed_experts.tolist() == raw.reshape(rows, 8, 4).tolist()


def test_an_abort_in_the_queue_has_no_tokens_and_no_rows():
    trace = trace_of(request(), sglang_reply(request(), SGLANG["aborted_in_queue"], MODEL), MODEL, 0)
    assert (trace.finish_reason, trace.completion_ids, trace.routed_experts) == ("abort", [], None)


def test_version_spans_of_output_tokens_become_spans_of_rows():
    body = copy.deepcopy(SGLANG["two_versions"])
    body["meta_info"]["weight_version"] = "1"
    body["meta_info"]["weight_versions"][1]["version"] = "1"
    trace = trace_of(request(), sglang_reply(request(), body, MODEL), MODEL, 0)
    assert trace.weight_versions == [(0, 0, 13), (1, 13, 15)]  # tokens 0 and 1 were sampled from rows 11 and 12


@pytest.mark.parametrize(
    "spans", [[(0, 2, 4)], [(0, 0, 3)], [(0, 0, 2), (1, 3, 4)], [(0, 0, 3), (1, 2, 4)], [(0, 0, 5)]]
)
def test_version_spans_that_leave_out_or_double_a_token_are_refused(spans):
    body = copy.deepcopy(SGLANG["two_versions"])
    body["meta_info"]["weight_version"] = str(spans[-1][0])
    keys = ("version", "start", "end")
    body["meta_info"]["weight_versions"] = [dict(zip(keys, (str(v), s, e), strict=True)) for v, s, e in spans]
    with pytest.raises(ValueError, match=r"run/0/0-0/0.*: version spans .* do not cover 4 output tokens"):
        trace_of(request(), sglang_reply(request(), body, MODEL), MODEL, 0)


def test_a_retracted_sequence_is_refused_or_loses_its_rows():
    body = copy.deepcopy(SGLANG["eos"])
    body["meta_info"]["num_retractions"] = 1
    reply = sglang_reply(request(), body, MODEL)
    with pytest.raises(ValueError, match=r"run/0/0-0/0.*retracted and recomputed"):
        trace_of(request(), reply, MODEL, 0)
    trace = trace_of(request(), reply, MODEL, 0, retractions="invalidate")
    assert trace.route_valid.tolist() == [False] * 15
    assert not trace.routed_experts.any()
    assert len(trace.completion_ids) == 4


def test_a_reply_that_does_not_say_whether_it_was_retracted_is_refused():
    body = copy.deepcopy(SGLANG["eos"])
    del body["meta_info"]["num_retractions"]
    with pytest.raises(ValueError, match=r"run/0/0-0/0.*the answer lacks 'num_retractions'"):
        sglang_reply(request(), body, MODEL)


def test_a_dense_first_layer_is_taken_out():
    layers = np.zeros((3, 3, 2), np.uint8)
    layers[:, 1:] = [[1, 2], [3, 0]]
    sites = RoutingSpec(
        tuple(s._replace(layer=s.layer + 1) for s in RoutingSpec.uniform(num_sites=2, num_experts=4, top_k=2).sites)
    )
    model = EngineModel("m", sites, 10, 512, num_layers=3, model=None)
    assert model.sites(layers, "r").tolist() == [[[1, 2], [3, 0]]] * 3
    with pytest.raises(ValueError, match="r: routes have shape"):
        model.sites(layers[:, 1:], "r")


def test_a_pickled_npy_is_not_read():
    file = base64.b64encode(
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(127)
        + b"\n"
        + b"cos\nsystem\n"
    ).decode()
    body = copy.deepcopy(one(VLLM["generate"]))
    body["choices"][0]["routed_experts"] = file
    with pytest.raises(ValueError, match="no base64 npy"):
        vllm_reply(request(), body, 0)


@pytest.mark.parametrize("shape", ["400", "contract_400", "validation_400", "503", "401"])
def test_every_error_shape_of_sglang_yields_its_message(shape):
    body = SGLANG["errors"][shape]
    nested = body.get("error", body)
    assert error_text(json.dumps(body)) == (nested if isinstance(nested, str) else nested["message"])


def test_vllm_errors_yield_their_message():
    assert error_text(json.dumps(VLLM["err_model"])) == "The model `nope` does not exist."
    assert error_text("<html>proxy</html>") == "<html>proxy</html>"


def test_an_engine_without_support_and_a_wrong_url_are_named():
    check_version("vLLM", "0.32.0", (0, 30))
    with pytest.raises(ValueError, match=r"vLLM 0\.9\.1 is too old .* 0\.30 or newer"):
        check_version("vLLM", "0.9.1", (0, 30))
    check_version("SGLang", "0.5.23.post2", (0, 5, 23))
    check_version("SGLang", "0.6.0rc1", (0, 5, 23))
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.9 is too old .* 0\.5\.23 or newer"):
        check_version("SGLang", "0.5.9", (0, 5, 23))
    with pytest.raises(ValueError, match="need http://host:port"):
        HttpEngine("gpu-node:30000", None, 1, 1)


def made(**changes) -> Trace:
    fields = {
        "sample_id": "run/0/0-0/0",
        "step": 0,
        "prompt_ids": [5, 7],
        "completion_ids": [9, 2],
        "logprobs": [-0.1, -0.2],
        "routed_experts": np.tile(np.array([[1, 2]], np.int32), (3, 1, 1)),
        "finish_reason": "length",
    }
    return Trace(**fields | changes)


def test_a_layer_of_zeros_is_refused_where_several_experts_are_chosen_and_noted_where_one_is(caplog):
    """A top-1 router may send all of a text to expert 0; that every router does is no model, but routes of nobody."""
    spec = RoutingSpec.uniform(num_sites=3, num_experts=8, top_k=1)
    routes = np.random.default_rng(0).integers(0, 8, (80, 3, 1))
    trace = made(prompt_ids=list(range(79)), routed_experts=routes)
    assert validate_trace(trace, spec) is trace
    assert caplog.messages == []
    routes[:, 1] = 0
    trace = made(prompt_ids=list(range(79)), routed_experts=routes)
    np.testing.assert_array_equal(validate_trace(trace, spec).routed_experts, routes)
    (message,) = caplog.messages
    assert message.startswith("trace 'run/0/0-0/0': site 1 (")
    assert "chose expert 0 in all of 80 rows" in message
    validate_trace(made(prompt_ids=list(range(20)), routed_experts=routes[:21]), spec)
    assert caplog.messages == [message]
    with pytest.raises(ValueError, match=r"every id of its 80 rows is 0: routes were not captured"):
        validate_trace(made(prompt_ids=list(range(79)), routed_experts=np.zeros_like(routes)), spec)
    pairs = np.random.default_rng(0).permuted(np.tile(np.arange(8), (80, 3, 1)), axis=-1)[:, :, :2]
    pairs[:, 1] = 0
    with pytest.raises(ValueError, match=r"site 1 \(.*an id twice in row 0: \[0, 0\]; was that row captured at all"):
        validate_trace(
            made(prompt_ids=list(range(79)), routed_experts=pairs),
            RoutingSpec.uniform(num_sites=3, num_experts=8, top_k=2),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routed_experts": np.full((3, 1, 2), 9)}, "need"),
        ({"routed_experts": np.full((3, 1, 2), 3)}, r"an id twice in row 0: \[3, 3\]"),
        ({"logprobs": [-0.1, float("inf")]}, "logprob of completion token 1 is inf"),
        ({"logprobs": [0.5, -0.1]}, "logprob of completion token 0 is 0.5"),
        ({"routed_experts": None}, "no routed_experts for 3 rows"),
    ],
)
def test_validate_trace_names_the_request_and_the_fault(changes, message):
    spec = RoutingSpec.uniform(num_sites=1, num_experts=8, top_k=2)
    assert validate_trace(made(), spec, [9, 2]).routed_experts.dtype == np.uint8
    with pytest.raises(ValueError, match=f"run/0/0-0/0.*{message}"):
        validate_trace(made(**changes), spec, [9, 2])
    with pytest.raises(ValueError, match=r"logprobs belong to tokens \[9, 3\]"):
        validate_trace(made(), spec, [9, 3])
