"""vLLM's token endpoints: what is asked, and how an answer is read.

Shapes of vLLM 0.30, recorded from a running server. Routes are base64 of an npy file over all decoder layers.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np

from rollout.backend import SampleRequest
from rollout.capabilities import Capabilities
from rollout.engine_reply import EngineReply
from rollout.rng import stream_key

CAPTURE_FLAG = "--enable-return-routed-experts"
TOKEN_PREFIX = "token_id:"
SAID = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters that vLLM calls by the same name, sent always: `/v1/completions` fills those that are left out
from the checkpoint's generation_config.json."""
PASSED = (
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "allowed_token_ids",
    "logit_bias",
    "stop_token_ids",
    "stop",
)
"""Others; sent when they differ from their defaults."""


NO_DETOKENIZER = "/inference/v1/generate has no tokenizer; use api='completions'"
IN_PROCESS = "vLLM in process runs without a detokenizer; connect to its server with api='completions'"


def vllm_capabilities(engine: str, *, no_stop: str | None, version_spans: bool) -> Capabilities:
    """What vLLM keeps of the contract. With 0.30 on a CPU the ids of a row come in the order of transformers' for
    Qwen3-MoE and Mixtral, and in another for OLMoE. `no_stop` is why stop strings are refused, or None."""
    return Capabilities(
        engine=engine,
        update_in_flight=version_spans,
        version_spans=version_spans,
        start_offset=True,
        prompt_logprobs=False,
        prompt_only=False,
        frozen_recompute=False,
        slot_order="differs",
        refused={"logprobs": "top-N tokens are not decoded", "bad_words": "its spellings are not this engine's"}
        | ({"stop": no_stop} if no_stop else {}),
    )


def vllm_sampling(request: SampleRequest) -> dict[str, Any]:
    """Keyword arguments of `vllm.SamplingParams`. The seed is the sample's own: equal seeds would draw near-identical
    completions of different prompts."""
    p = request.sampling_params
    changed = {
        name: getattr(p, name) for name in PASSED if getattr(p, name) != type(p).model_fields[name].get_default()
    }
    changed |= {name: getattr(p, name) for name in SAID}
    if request.routed_experts_start_len:
        changed["routed_experts_prompt_start"] = request.routed_experts_start_len
    return {
        "max_tokens": p.max_tokens,
        "temperature": p.temperature,
        "seed": stream_key(request.seed, request.stream_id or request.sample_id) & (2**63 - 1),
        "logprobs": 0,
    } | {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}


def generate_body(request: SampleRequest, request_id: str, model_name: str) -> dict[str, Any]:
    """The body of `POST /inference/v1/generate`."""
    return {
        "request_id": request_id,
        "model": model_name,
        "token_ids": list(request.prompt_ids),
        "sampling_params": vllm_sampling(request),
        "stream": False,
    }


def completions_body(request: SampleRequest, model_name: str) -> dict[str, Any]:
    """The body of `POST /v1/completions` with token ids instead of text."""
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": model_name, "prompt": [list(request.prompt_ids)], **vllm_sampling(request), **ids}


def vllm_reply(request: SampleRequest, body: Any, version: int) -> EngineReply:
    """Decode an answer of either endpoint. The reply names no weight version: the caller keeps it.

    Raises:
        ValueError: naming the request and what is missing or cannot be.
    """
    name = f"trace {request.sample_id!r}"
    try:
        (choice,) = body["choices"]
        ids = [int(token) for token in choice["token_ids"]]
        logprob_ids, logprobs = _logprobs(choice["logprobs"])
        finish, encoded = choice["finish_reason"], choice.get("routed_experts")
        prompt = choice.get("prompt_token_ids")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{name}: the answer lacks {error}: {str(body)[:200]}") from error
    if prompt is not None and list(prompt) != list(request.prompt_ids):
        raise ValueError(f"{name}: the answer is for another prompt, {prompt[:8]}")
    if encoded is None and ids:
        raise ValueError(f"{name}: no routed_experts in the answer; start the server with {CAPTURE_FLAG}")
    return EngineReply(
        output_ids=ids,
        logprob_ids=logprob_ids,
        logprobs=logprobs,
        layers=npy_routes(encoded, name) if ids else None,
        finish_reason=finish,
        stop_reason=vllm_stop_reason(request, ids, finish, choice.get("stop_reason")),
        versions=[(version, 0, len(ids))],
    )


def vllm_stop_reason(request: SampleRequest, ids: list[int], finish: str, named: int | str | None) -> int | str | None:
    """The stop string, or the last token when the caller gave it as one to stop at; None for the model's end token.

    `/inference/v1/generate` names none.
    """
    if isinstance(named, str) or finish != "stop":
        return named
    return ids[-1] if ids and ids[-1] in request.sampling_params.stop_token_ids else None


def npy_routes(encoded: str, name: str) -> np.ndarray:
    """uint8 or uint16 `[rows, layers, K]` of a base64 npy file; nothing in it is unpickled."""
    try:
        raw = base64.b64decode(encoded, validate=True)
        routes = np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
    except (binascii.Error, TypeError, ValueError, EOFError) as error:
        raise ValueError(f"{name}: routed_experts is no base64 npy ({error}); was the answer cut short?") from error
    if routes.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"{name}: routed_experts is {routes.dtype}, vLLM sends uint8 or uint16")
    return routes


def _logprobs(found: Any) -> tuple[list[int], list[float]]:
    """Token ids and logprobs, as `/inference/v1/generate` or `/v1/completions` spell them."""
    if found is None:
        raise KeyError("logprobs")
    if "content" in found:
        pairs = [(item["token"], item["logprob"]) for item in found["content"]]
    else:
        pairs = list(zip(found["tokens"], found["token_logprobs"], strict=True))
    if wrong := [token for token, _ in pairs if not token.startswith(TOKEN_PREFIX)]:
        raise KeyError(f"'token_id:N' in logprobs, which say {wrong[0]!r}")
    return [int(token.removeprefix(TOKEN_PREFIX)) for token, _ in pairs], [float(value) for _, value in pairs]
