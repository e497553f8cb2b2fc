"""SGLang as a Backend: over HTTP, to servers that run already."""

from __future__ import annotations

import logging
from typing import Any

from rollout.backend import SampleRequest
from rollout.canary import OUTPUT_TOKENS, PROMPT_TOKENS, greedy_requests, scaled_by_temperature, sing
from rollout.engine_model import EngineModel, describe_model
from rollout.engine_reply import EngineError, EngineReply
from rollout.engine_versions import CONDEMNED, check_version, version_number
from rollout.http_engine import HttpEngine
from rollout.served_engine import Retractions, ServedBackend
from rollout.sglang_wire import MIN_VERSION, sglang_capabilities, sglang_payload, sglang_reply

logger = logging.getLogger(__name__)


class SglangHttp:
    """Implements `rollout.engine_adapter.EngineAdapter` over SGLang's HTTP server.

    `admin_api_key` is for servers that guard abort, pause and update with a key of their own.
    """

    takes_state_dicts = owned = False
    progress = None

    def __init__(self, http: HttpEngine, model: EngineModel, admin_api_key: str | None = None) -> None:
        self._http, self.model = http, model
        self._admin = {"Authorization": f"Bearer {admin_api_key}"} if admin_api_key else None
        self.capabilities = sglang_capabilities("SGLang")
        self.own_weights, self.max_sequence_tokens = model.path, model.max_positions

    async def open(self) -> int:
        """Check version and flags, then with one small request that routes of this model come back."""
        facts = await self._http.call("GET", "/server_info", accept=(404,))
        number = facts.get("version") if isinstance(facts, dict) else None
        seeded = isinstance(facts, dict) and facts.get("enable_deterministic_inference") is True
        if number is None:
            logger.warning("%s does not tell its version; SGLang 0.5.23 is what this adapter knows", self._http.url)
        else:
            check_version("SGLang", str(number), MIN_VERSION)
        if isinstance(facts, dict):
            self.max_sequence_tokens = int(facts.get("context_length") or self.max_sequence_tokens)
        facts = await self._model_info()
        version = version_number(facts["weight_version"])
        self.own_weights = facts.get("model_path") or self.model.path
        await self._probe()
        scaled = await scaled_by_temperature(self.generate, self.model)
        self.capabilities = sglang_capabilities(f"SGLang {number or ''}".strip(), seeded=seeded, scaled=scaled)
        return version

    async def weight_version(self) -> int:
        """`GET /model_info`; ValueError when its text is no number."""
        return version_number((await self._model_info())["weight_version"])

    async def _model_info(self) -> Any:
        return await self._http.call("GET", "/model_info")

    async def condemn(self) -> None:
        """Name its weights so that no client takes them for good."""
        await self._name_version(CONDEMNED)

    async def _name_version(self, text: str) -> None:
        await self._post("/update_weight_version", {"new_version": text, "abort_all_requests": True})

    async def _probe(self) -> None:
        if self.max_sequence_tokens < PROMPT_TOKENS + OUTPUT_TOKENS:
            raise ValueError(f"{self._http.url} takes {self.max_sequence_tokens} tokens; raise --context-length")
        try:
            self.model.check_served(self.own_weights)
            await sing(self.generate, self.model, greedy_requests(self.model.vocab_size))
        except ValueError as error:
            raise ValueError(f"{self._http.url} cannot serve model {self.model.path!r} with routes: {error}") from error

    async def generate(self, request: SampleRequest, request_id: str) -> EngineReply:
        """`POST /generate`."""
        body = await self._http.call("POST", "/generate", sglang_payload(request, request_id))
        return sglang_reply(request, body, self.model)

    async def abort(self, request_id: str) -> None:
        """`POST /abort_request`, which matches by prefix: ids are of fixed width."""
        await self._post("/abort_request", {"rid": request_id, "abort_all": False})

    async def load_weights(self, source: Any, version: int, *, running: bool = False) -> None:
        """`POST /update_weights_from_disk`.

        A refused cache flush comes with new weights under the old version: all is retracted, flushed, and named.
        """
        body = {
            "model_path": str(source),
            "flush_cache": True,
            "abort_all_requests": False,
            "weight_version": str(version),
        }
        answer = await self._http.call("POST", "/update_weights_from_disk", body, self._admin, accept=(400,))
        if not answer.get("success"):
            if "not flushed" not in answer.get("message", ""):
                raise EngineError(f"{self._http.url} did not load {source}: {answer.get('message', answer)}")
            await self._repair(version)
        found = await self.weight_version()
        if found != version:
            raise EngineError(f"{self._http.url} says weight version {found} behind an update to {version}")

    async def _repair(self, version: int) -> None:
        logger.warning("%s loaded weights without dropping its cache; retracting and flushing", self._http.url)
        await self._post("/pause_generation", {"mode": "retract"})
        try:
            await self._post("/flush_cache", {})
            await self._name_version(str(version))
        finally:
            await self._post("/continue_generation", {})

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        return await self._http.call("POST", path, body, self._admin)

    async def close(self) -> None:
        """Leave the server as it is."""
        await self._http.close()


def connect_sglang(
    url: str,
    model: str | None = None,
    *,
    api_key: str | None = None,
    ca_file: str | None = None,
    admin_api_key: str | None = None,
    timeout: float = 600.0,
    max_running_requests: int = 512,
    retractions: Retractions = "refuse",
    trust_remote_code: bool = False,
) -> ServedBackend:
    """A Backend over a running server.

    Args:
        model: where its config and tokenizer are; needed, since a server's own path may be another machine's.
        ca_file: PEM file of the authority that signed the server's certificate, when the system does not know it.
        timeout: seconds for one answer.

    Raises:
        EngineError, ValueError: the server cannot be reached or used; the message says what to start it with.
    """
    if model is None:
        raise ValueError("model is missing: the checkpoint directory or hub id that the server serves")
    http = HttpEngine(url, api_key, max_running_requests + 8, timeout, ca_file=ca_file)
    adapter = SglangHttp(http, describe_model(model, trust_remote_code), admin_api_key)
    return ServedBackend(adapter, max_running_requests=max_running_requests, retractions=retractions)
