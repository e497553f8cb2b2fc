"""vLLM as a Backend: over HTTP, to servers that run already. In process see vllm_in_process.py."""

from __future__ import annotations

from typing import Any, Literal

from rollout.backend import SampleRequest
from rollout.canary import greedy_requests, one_choice, sing
from rollout.engine_adapter import new_request_id
from rollout.engine_model import EngineModel, describe_model
from rollout.engine_reply import EngineDeadError, EngineError, EngineReply
from rollout.engine_versions import CONDEMNED, check_version, version_number
from rollout.http_engine import HttpEngine
from rollout.served_engine import ServedBackend
from rollout.vllm_wire import NO_DETOKENIZER, completions_body, generate_body, vllm_capabilities, vllm_reply

MIN_VERSION = (0, 30)
START = (
    "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model M --enable-return-routed-experts "
    "--enable-scale-out --logprobs-mode processed_logprobs --worker-extension-cls rollout.vllm_extension.LoadExtension "
    "(on a CPU also --worker-cls rollout.vllm_cpu_worker.SeededCpuWorker)"
)


class VllmHttp:
    """Implements `rollout.engine_adapter.EngineAdapter` over vLLM's HTTP server.

    `api` is "generate" for `/inference/v1/generate`, or "completions" for `/v1/completions`, which also takes `stop`.
    """

    takes_state_dicts = owned = False
    progress = None

    def __init__(self, http: HttpEngine, model: EngineModel, api: Literal["generate", "completions"]) -> None:
        self._http, self.model, self._api = http, model, api
        self._name, self._version = "", 0
        self.own_weights = model.path
        self.max_sequence_tokens = model.max_positions
        self.capabilities = self._capabilities("vLLM")

    async def open(self) -> int:
        """Check version, model and flags, then with small requests that routes of this model come back."""
        try:
            await self._look()
            await self._probe()
        except EngineDeadError as error:
            raise EngineDeadError(f"{error} Start it as: {START}") from error
        except (ValueError, EngineError) as error:
            raise ValueError(
                f"{self._http.url} cannot serve model {self.model.path!r} with routes: {error}. Start it as: {START}"
            ) from error
        return self._version

    async def _look(self) -> None:
        """What the server says of itself."""
        number = str((await self._http.call("GET", "/version"))["version"])
        check_version("vLLM", number, MIN_VERSION)
        self.capabilities = self._capabilities(f"vLLM {number}")
        (served, *_) = (await self._http.call("GET", "/v1/models"))["data"]
        self._name = served["id"]
        self.model.check_served(served.get("root"))
        self.max_sequence_tokens = int(served.get("max_model_len") or self.max_sequence_tokens)
        self._version = await self.weight_version()

    async def weight_version(self) -> int:
        """`GET /weight_info`; ValueError when its text is no number."""
        return version_number((await self._http.call("GET", "/weight_info"))["weight_version"])

    async def _probe(self) -> None:
        """What it does: routes, logprobs of the distribution sampled from, and whether it can load weights."""
        await sing(self.generate, self.model, greedy_requests(self.model.vocab_size))
        sure = await self.generate(one_choice(self.model.vocab_size), new_request_id())
        if not abs(sure.logprobs[0]) < 1e-3:
            raise ValueError(
                f"its logprobs are not of the distribution sampled from: one token to choose from has logprob "
                f"{sure.logprobs[0]:.4g}, need 0; --logprobs-mode processed_logprobs is missing"
            )
        try:
            (found, *_) = (await self._rpc("can_load"))["results"]
        except EngineError as error:
            raise ValueError(
                f"it cannot load weights in place, --worker-extension-cls or VLLM_SERVER_DEV_MODE is missing: {error}"
            ) from error
        if "model" not in found:
            raise ValueError(
                f"its LoadExtension says {found}, need its model: install the moe-rollout of this client there"
            )
        self.own_weights = found["model"]

    async def generate(self, request: SampleRequest, request_id: str) -> EngineReply:
        """One sequence through the chosen endpoint."""
        if self._api == "completions":
            body, headers = completions_body(request, self._name), {"X-Request-Id": request_id}
            answer = await self._http.call("POST", "/v1/completions", body, headers)
        else:
            body = generate_body(request, request_id, self._name)
            answer = await self._http.call("POST", "/inference/v1/generate", body)
        return vllm_reply(request, answer, self._version)

    async def abort(self, request_id: str) -> None:
        """`POST /abort_requests` with the id that the server made of ours; with ours it would abort nothing."""
        theirs = f"cmpl-{request_id}-0" if self._api == "completions" else f"generate-tokens-{request_id}"
        await self._http.call("POST", "/abort_requests", {"request_ids": [theirs]})

    async def load_weights(self, source: Any, version: int, *, running: bool = False) -> None:
        """Pause, load through our worker extension, drop the prefix cache, name the version, resume.

        Weights that may be half loaded are condemned before the requests of others go on.
        """
        try:
            await self._http.call("POST", "/pause?mode=wait")
            await self._rpc("load_checkpoint", path=str(source))
            flushed = await self._http.call("POST", "/reset_prefix_cache")
            if not flushed.get("success"):
                raise EngineError(f"{self._http.url} kept its prefix cache, rows of the old weights would be reused")
            await self._name_version(str(version))
        except BaseException as error:
            await self._let_go(error)
            raise
        await self._http.call("POST", "/resume")
        self._version = version

    async def _let_go(self, error: BaseException) -> None:
        try:
            await self.condemn()
            await self._http.call("POST", "/resume")
        except EngineError as another:
            error.add_note(f"and it stays paused: {another}")

    async def _rpc(self, method: str, **kwargs: str) -> Any:
        return await self._http.call("POST", "/collective_rpc", {"method": method, "kwargs": kwargs})

    async def condemn(self) -> None:
        """Name its weights so that no client takes them for good."""
        await self._name_version(CONDEMNED)

    async def _name_version(self, text: str) -> None:
        await self._http.call("POST", "/update_weight_version", {"new_version": text})

    async def close(self) -> None:
        """Leave the server as it is."""
        await self._http.close()

    def _capabilities(self, engine: str) -> Any:
        no_stop = NO_DETOKENIZER if self._api == "generate" else None
        return vllm_capabilities(engine, no_stop=no_stop, version_spans=False)


def connect_vllm(
    url: str,
    model: str | None = None,
    *,
    api_key: str | None = None,
    ca_file: str | None = None,
    api: Literal["generate", "completions"] = "generate",
    timeout: float = 600.0,
    max_running_requests: int = 512,
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
    if api not in ("generate", "completions"):
        raise ValueError(f"api is {api!r}, need 'generate' or 'completions'")
    if model is None:
        raise ValueError("model is missing: the checkpoint directory or hub id that the server serves")
    http = HttpEngine(url, api_key, max_running_requests + 8, timeout, ca_file=ca_file)
    adapter = VllmHttp(http, describe_model(model, trust_remote_code), api)
    return ServedBackend(adapter, max_running_requests=max_running_requests)
