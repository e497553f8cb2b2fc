"""SGLang's offline Engine as a Backend: started by this process or Ray actor, its schedulers in processes of their own.

The call surface of SGLang 0.5.23 (srt/entrypoints/engine.py). Coroutines of its tokenizer manager run on our event
loop; the Engine's own synchronous methods would start a second one.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rollout.backend import SampleRequest
from rollout.canary import greedy_requests, scaled_by_temperature, sing
from rollout.engine_model import EngineModel, describe_model
from rollout.engine_reply import EngineDeadError, EngineError, EngineReply
from rollout.engine_versions import check_version
from rollout.served_engine import Retractions, ServedBackend
from rollout.served_weights import saved_directory
from rollout.sglang_wire import MIN_VERSION, sglang_capabilities, sglang_payload, sglang_reply
from rollout.sharded_loader import checkpoint_directory


class SglangEngine:
    """Implements `rollout.engine_adapter.EngineAdapter` over `sglang.Engine`.

    `options` are SGLang's ServerArgs; model and capture are set here. A state dict reaches the schedulers through a
    temporary directory of safetensors.
    """

    takes_state_dicts = owned = True

    def __init__(self, model: EngineModel, options: Mapping[str, Any]) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise ImportError(
                "backend='sglang' needs SGLang 0.5.23 or newer in this environment: pip install sglang on a GPU "
                "machine; or start its server and use RolloutClient.connect(url, backend='sglang', model=...)"
            )
        self.model, self._options = model, dict(options)
        self.max_sequence_tokens = model.max_positions
        self.capabilities = sglang_capabilities("SGLang")
        self._engine: Any = None
        self._building: asyncio.Future[Any] | None = None  # a start cannot be interrupted, `close` waits for it
        self._version, self._release = 0, ""

    @property
    def own_weights(self) -> str:
        """The directory that it was started from, of a hub id the one in this machine's cache."""
        return str(checkpoint_directory(self.model.path))

    async def open(self) -> int:
        """Start the engine; behind a death, another one."""
        await self.close()
        self._building = asyncio.ensure_future(asyncio.to_thread(self._build))
        self._engine = await asyncio.shield(self._building)
        self._version = 0
        self.max_sequence_tokens = int(self._engine.tokenizer_manager.context_len)
        await sing(self.generate, self.model, greedy_requests(self.model.vocab_size))
        seeded = self._options.get("enable_deterministic_inference") is True
        scaled = await scaled_by_temperature(self.generate, self.model)
        self.capabilities = sglang_capabilities(f"SGLang {self._release}", seeded=seeded, scaled=scaled)
        return self._version

    def _build(self) -> Any:
        import sglang

        self._release = str(sglang.__version__)
        check_version("SGLang", self._release, MIN_VERSION)
        ours = {
            "model_path": self.model.path,
            "enable_return_routed_experts": True,
            "skip_tokenizer_init": not self.model.has_tokenizer,
        }
        return sglang.Engine(**self._options, **ours)

    @property
    def progress(self) -> int | None:
        """When its schedulers sent something last, in ms: every 50 tokens of a request at the latest.

        SGLang's own health check reads the same.
        """
        return None if self._engine is None else int(1000 * self._engine.tokenizer_manager.last_receive_tstamp)

    async def weight_version(self) -> int:
        """Its own count: nobody else loads weights here."""
        return self._version

    async def generate(self, request: SampleRequest, request_id: str) -> EngineReply:
        """`Engine.async_generate`."""
        try:
            body = await self._opened().async_generate(**sglang_payload(request, request_id))
        except (RuntimeError, OSError) as error:
            raise EngineDeadError(f"SGLang's engine failed: {type(error).__name__}: {error}") from error
        return sglang_reply(request, body, self.model)

    async def abort(self, request_id: str) -> None:
        """It ends with what it has. Ids match by prefix: they are of fixed width."""
        self._opened().tokenizer_manager.abort_request(rid=request_id)

    async def load_weights(self, source: Any, version: int, *, running: bool = False) -> None:
        """`update_weights_from_disk` with the cache flush; nothing runs, so a refused flush is an error."""
        if not isinstance(source, Mapping):
            await self._load(str(source), version)
            return
        with ExitStack() as stack:
            folder = await asyncio.to_thread(stack.enter_context, saved_directory(source, self.model))
            await self._load(folder, version)

    async def _load(self, path: str, version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        asked = UpdateWeightFromDiskReqInput(model_path=path, flush_cache=True, weight_version=str(version))
        done, message, *_ = await self._opened().tokenizer_manager.update_weights_from_disk(asked, None)
        if not done:
            raise EngineError(f"SGLang did not load {path}: {message}")
        self._version = version

    async def condemn(self) -> None:
        """Nothing: `open` starts another engine."""

    async def close(self) -> None:
        """End its processes. SGLang's shutdown ends every child process of this one, also those of others."""
        building, self._building, self._engine = self._building, None, None
        if building is not None:
            await asyncio.wait([building])
            if building.exception() is None:
                await asyncio.to_thread(building.result().shutdown)

    def _opened(self) -> Any:
        if self._engine is None:
            raise EngineDeadError("SGLang's engine was closed")
        return self._engine


def start_sglang(
    model: str,
    *,
    max_running_requests: int = 512,
    retractions: Retractions = "refuse",
    trust_remote_code: bool = False,
    **options: Any,
) -> ServedBackend:
    """SGLang's Engine; `options` are its ServerArgs: `dtype="bfloat16", tp_size=2, mem_fraction_static=0.8`.

    Raises:
        ImportError: SGLang is not installed; the message says how to.
        ValueError: the model is dense, or SGLang too old.
    """
    adapter = SglangEngine(describe_model(model, trust_remote_code), options | {"trust_remote_code": trust_remote_code})
    return ServedBackend(adapter, max_running_requests=max_running_requests, retractions=retractions)
