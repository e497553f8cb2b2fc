"""SGLang's `/generate`, the same over HTTP and in the offline Engine: what is asked, and how an answer is read.

Shapes of SGLang 0.5.23. Routes are base64 of raw int32 in C order over all decoder layers, without shape or start.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from rollout.backend import SampleRequest
from rollout.capabilities import Capabilities
from rollout.engine_model import EngineModel
from rollout.engine_reply import EngineReply
from rollout.engine_versions import version_number
from rollout.rng import stream_key

MIN_VERSION = (0, 5, 23)
CAPTURE_FLAG = "--enable-return-routed-experts"
OFF = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
UNFILTERED = "its logprobs are those before this filter, not of the distribution sampled from"
UNSCALED = "its logprobs are those before the temperature; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
UNSEEDED = "it ignores seeds unless it is started with --enable-deterministic-inference; leave the seed out"
UNMEASURED = "its meaning there differs or was never compared with this engine's"


def sglang_capabilities(engine: str, *, seeded: bool = False, scaled: bool = False) -> Capabilities:
    """What SGLang keeps of the contract; `engine` is its name and version.

    Args:
        seeded: it runs with deterministic inference. Otherwise its sampler draws without the seeds of requests.
        scaled: its logprobs are those behind the temperature, as asked when a client connects.
    """
    unmeasured = (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logprobs",
    )
    return Capabilities(
        engine=engine,
        per_request_capture=True,
        update_in_flight=False,
        start_offset=True,
        prompt_logprobs=False,
        prompt_only=False,
        frozen_recompute=False,
        slot_order="unmeasured",
        refused=dict.fromkeys(("top_p", "top_k", "min_p"), UNFILTERED)
        | dict.fromkeys(unmeasured, UNMEASURED)
        | ({} if seeded else {"seed": UNSEEDED})
        | ({} if scaled else {"temperature": UNSCALED}),
    )


def sglang_payload(request: SampleRequest, request_id: str) -> dict[str, Any]:
    """The body of `/generate` for one sequence, also the arguments of `Engine.async_generate`.

    One request per sample, never `n`: SGLang gives the n sequences ids of its own, which nobody could abort. What is
    left out a server would fill from its --preferred-sampling-params, so filters and penalties are said to be off.
    """
    p = request.sampling_params
    sampling = {
        "max_new_tokens": p.max_tokens,
        "min_new_tokens": p.min_tokens,
        "temperature": p.temperature,
        **OFF,
        "sampling_seed": stream_key(request.seed, request.stream_id or request.sample_id) & (2**31 - 1),
        "ignore_eos": p.ignore_eos,
        "stop": list(p.stop),
        "stop_token_ids": list(p.stop_token_ids),
    }
    return {
        "rid": request_id,
        "input_ids": list(request.prompt_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_routed_experts": True,
        "routed_experts_start_len": request.routed_experts_start_len,
        "stream": False,
    }


def sglang_reply(request: SampleRequest, body: Any, model: EngineModel) -> EngineReply:
    """Decode one answer.

    Raises:
        ValueError: naming the request and what is missing or cannot be.
    """
    name = f"trace {request.sample_id!r}"
    try:
        meta, ids = body["meta_info"], [int(token) for token in body["output_ids"]]
        finish, triples = meta["finish_reason"], meta["output_token_logprobs"]
        logprobs, logprob_ids = [float(t[0]) for t in triples], [int(t[1]) for t in triples]
        kind, matched = finish["type"], finish.get("matched")
        retractions = int(meta["num_retractions"]) if ids else 0  # one that ended in the queue has none
        spans = [
            (version_number(s["version"]), int(s["start"]), int(s["end"])) for s in meta.get("weight_versions", ())
        ]
        spans = spans or [(version_number(meta["weight_version"]), 0, len(ids))]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{name}: the answer lacks {error}: {str(body)[:200]}") from error
    if kind == "abort" and finish.get("status_code") not in (None, 200):
        raise ValueError(f"{name}: the engine gave it up: {finish['status_code']} {finish.get('message')}")
    rows = len(request.prompt_ids) + len(ids) - 1 - request.routed_experts_start_len
    return EngineReply(
        output_ids=ids,
        logprob_ids=logprob_ids,
        logprobs=logprobs,
        layers=_layers(meta.get("routed_experts"), rows, model, name) if ids else None,
        finish_reason=kind,
        stop_reason=matched if isinstance(matched, str) or matched in request.sampling_params.stop_token_ids else None,
        versions=spans,
        recomputed=retractions > 0,
    )


def _layers(encoded: Any, rows: int, model: EngineModel, name: str) -> np.ndarray:
    """int32 `[rows, layers, K]`, not checked against the number of experts yet."""
    if encoded is None:
        raise ValueError(f"{name}: no routed_experts in the answer; start the server with {CAPTURE_FLAG}")
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"{name}: routed_experts is no base64 ({error}); was the answer cut short?") from error
    shape = rows, model.num_layers, model.spec.top_k
    if len(raw) != 4 * rows * shape[1] * shape[2]:
        raise ValueError(
            f"{name}: routed_experts holds {len(raw)} bytes, need {4 * rows * shape[1] * shape[2]} for "
            f"int32 {shape} (T - 1 rows, decoder layers, K); is this the server's model?"
        )
    return np.frombuffer(raw, "<i4").reshape(shape)
