"""vLLM inside this process or Ray actor: its synchronous engine, stepped by one thread that also runs our commands."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rollout.backend import SampleRequest
from rollout.canary import greedy_requests, sing
from rollout.engine_model import EngineModel, describe_model
from rollout.engine_reply import EngineDeadError, EngineError, EngineReply
from rollout.engine_thread import EngineThread
from rollout.engine_versions import check_version
from rollout.served_engine import ServedBackend
from rollout.vllm_backend import MIN_VERSION
from rollout.vllm_load import load
from rollout.vllm_wire import IN_PROCESS, vllm_capabilities, vllm_sampling, vllm_stop_reason

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM reads these when it is imported: one process, and no threads pinned to cores that others use too."""


def require_vllm() -> None:
    """ImportError, with the way to get it, when vLLM is not installed; imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        raise ImportError(
            "backend='vllm' needs vLLM 0.30 or newer in this environment: pip install vllm on a GPU machine; for a "
            "CPU see tests/engines/make_vllm_env.sh"
        )


@dataclass
class _Waiting:
    """A request under way; `versions` has the weight version of its output tokens from each position on."""

    request: SampleRequest
    reply: Future[EngineReply]
    versions: list[tuple[int, int]] = field(default_factory=list)

    def changed(self, version: int, tokens: int) -> None:
        """Output token `tokens` is the first of `version`; with none, the prompt is computed again as well."""
        self.versions = [span for span in self.versions if span[1] < tokens]
        if not self.versions or self.versions[-1][0] != version:
            self.versions.append((version, tokens if self.versions else 0))

    def spans(self, tokens: int) -> list[tuple[int, int, int]]:
        """`(version, first, last + 1)` over the output tokens; a version that came behind the last one has none."""
        ends = [start for _, start in self.versions[1:]] + [tokens]
        return [(version, start, end) for (version, start), end in zip(self.versions, ends, strict=True) if start < end]


class VllmInProcess:
    """Implements `rollout.engine_adapter.EngineAdapter` over `vllm.v1.engine.llm_engine.LLMEngine`.

    `options` are vLLM's EngineArgs; capture, processed logprobs and our worker extension are set here.
    """

    takes_state_dicts = owned = True

    def __init__(self, model: EngineModel, options: Mapping[str, Any]) -> None:
        require_vllm()
        self.model, self._options = model, dict(options)
        self.max_sequence_tokens = model.max_positions
        self.capabilities = vllm_capabilities("vLLM", no_stop=IN_PROCESS, version_spans=False)
        self._waiting: dict[str, _Waiting] = {}
        self._version = self._steps = 0
        self._engine: Any = None
        self._thread: EngineThread | None = None

    async def open(self) -> int:
        """Build the engine on the thread that will step it; behind a death, once more."""
        await self.close()
        self._thread = EngineThread(self._busy, self._step, self._ended)
        await self._thread.do(self._build)
        self._version = 0
        await sing(self.generate, self.model, greedy_requests(self.model.vocab_size))
        return self._version

    @property
    def own_weights(self) -> str:
        """As vLLM names it: with HF_HUB_OFFLINE=1 the directory that it made of a hub id."""
        return self.model.path if self._engine is None else str(self._engine.vllm_config.model_config.model)

    @property
    def progress(self) -> int:
        """Steps that the engine has returned from."""
        return self._steps

    async def weight_version(self) -> int:
        """Its own count: nobody else loads weights here."""
        return self._version

    def _build(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        check_version("vLLM", vllm.__version__, MIN_VERSION)
        ours = {
            "enable_return_routed_experts": True,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": "rollout.vllm_extension.LoadExtension",
            "skip_tokenizer_init": not self.model.has_tokenizer,
        }
        if current_platform.is_cpu():
            ours["worker_cls"] = "rollout.vllm_cpu_worker.SeededCpuWorker"
        arguments = EngineArgs(**{"model": self.model.path, "disable_log_stats": True, **self._options, **ours})
        self._engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self.max_sequence_tokens = int(self._engine.vllm_config.model_config.max_model_len)
        spans = not self._engine.vllm_config.scheduler_config.async_scheduling  # else tokens are under way in an update
        self.capabilities = vllm_capabilities(f"vLLM {vllm.__version__}", no_stop=IN_PROCESS, version_spans=spans)

    async def generate(self, request: SampleRequest, request_id: str) -> EngineReply:
        """Queue one sequence and wait for its end."""
        reply: Future[EngineReply] = Future()
        await self._opened().do(lambda: self._add(request, request_id, reply))
        return await asyncio.wrap_future(reply)

    def _add(self, request: SampleRequest, request_id: str, reply: Future[EngineReply]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        final = {"detokenize": False, "flat_logprobs": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        sampling = vllm_sampling(request)
        if not request.sampling_params.ignore_eos:  # without a tokenizer vLLM knows no end token
            stops = {*request.sampling_params.stop_token_ids, *self.model.eos_token_ids}
            sampling["stop_token_ids"] = sorted(stops)
        params = SamplingParams(**sampling, **final)
        self._engine.add_request(request_id, {"prompt_token_ids": list(request.prompt_ids)}, params)
        self._waiting[request_id] = _Waiting(request, reply, [(self._version, 0)])

    async def abort(self, request_id: str) -> None:
        """End it now, with what it has."""
        await self._opened().do(lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        """The synchronous engine drops the output of an abort, unless the request's state has a queue to put it."""
        processor, ended = self._engine.output_processor, _Ended()
        for internal in list(processor.external_req_ids.get(request_id, ())):
            if internal in processor.request_states:
                processor.request_states[internal].queue = ended
        self._engine.abort_request([request_id])
        for output in ended.outputs:
            self._finish(output)

    async def load_weights(self, source: Any, version: int, *, running: bool = False) -> None:
        """See `vllm_load.load`. With `running`, vLLM preempts what is under way: keys and values are computed again
        with the new weights, and the rows of tokens it has delivered stay those of their sampling.
        """
        await self._opened().do(lambda: self._load(source, version, running))

    def _load(self, source: Any, version: int, running: bool) -> None:
        load(self._engine, source, self.model)
        if not self._engine.reset_prefix_cache(reset_running_requests=running):
            raise EngineError("vLLM kept its prefix cache, rows of the old weights would be reused")
        self._version = version
        for request_id, waiting in self._waiting.items():
            waiting.changed(version, self._delivered(request_id))

    def _delivered(self, request_id: str) -> int:
        """Tokens sampled so far."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        (internal,) = self._engine.output_processor.external_req_ids[request_id]
        return int(scheduler.requests[internal].num_output_tokens)

    async def condemn(self) -> None:
        """End it, with all that is under way: weights may be half loaded, and `open` builds another engine."""
        await self.close()

    async def close(self) -> None:
        """Stop the thread and free the engine."""
        if self._thread is not None:
            await self._thread.stop()
            self._thread = None

    def _opened(self) -> EngineThread:
        if self._thread is None:
            raise EngineDeadError("vLLM's engine was closed")
        return self._thread

    def _busy(self) -> bool:
        return self._engine is not None and self._engine.has_unfinished_requests()

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._finish(output)
        self._steps += 1

    def _finish(self, output: Any) -> None:
        waiting = self._waiting.pop(output.request_id, None)
        if waiting is not None and waiting.reply.set_running_or_notify_cancel():
            try:
                reply = _reply(waiting, output.outputs[0])
            except Exception as error:  # nobody else would answer whoever waits for this one
                why = f"vLLM's answer cannot be read: {type(error).__name__}: {error}"
                waiting.reply.set_exception(EngineError(why))
            else:
                waiting.reply.set_result(reply)

    def _ended(self, error: Exception | None) -> None:
        """The thread's last act: what is under way fails, and the engine's memory is freed."""
        waiting, self._waiting = self._waiting, {}
        why = f"vLLM's engine failed: {type(error).__name__}: {error}" if error else "vLLM's engine was closed"
        for one in waiting.values():
            if one.reply.set_running_or_notify_cancel():
                one.reply.set_exception(EngineDeadError(why))
        if self._engine is not None:
            self._engine.engine_core.shutdown()
            self._engine = None
            gc.collect()


class _Ended:
    """Takes the outputs of aborted requests."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def put(self, output: Any) -> None:
        self.outputs.append(output)


def _reply(waiting: _Waiting, sequence: Any) -> EngineReply:
    ids = list(sequence.token_ids)
    chosen = [sequence.logprobs[index] for index in range(len(ids))]
    return EngineReply(
        output_ids=ids,
        logprob_ids=[token if token in found else -1 for token, found in zip(ids, chosen, strict=True)],
        logprobs=[
            found[token].logprob if token in found else float("nan") for token, found in zip(ids, chosen, strict=True)
        ],
        layers=sequence.routed_experts if ids else None,
        finish_reason=sequence.finish_reason,
        stop_reason=vllm_stop_reason(waiting.request, ids, sequence.finish_reason, sequence.stop_reason),
        versions=waiting.spans(len(ids)),
    )


def start_vllm(
    model: str, *, max_running_requests: int = 512, trust_remote_code: bool = False, **options: Any
) -> ServedBackend:
    """vLLM in this process; `options` are its EngineArgs: `dtype="float32", max_model_len=512, enforce_eager=True`.

    Raises:
        ImportError: vLLM is not installed; the message says how to.
        ValueError: the model is dense, or vLLM too old.
    """
    adapter = VllmInProcess(
        describe_model(model, trust_remote_code), options | {"trust_remote_code": trust_remote_code}
    )
    return ServedBackend(adapter, max_running_requests=max_running_requests)
