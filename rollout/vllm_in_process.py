"""vLLM inside this process or Ray actor: its synchronous engine, stepped by one thread that also runs our commands."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from rollout.backend import SampleRequest
from rollout.canary import sing
from rollout.engine_model import EngineModel, describe_model
from rollout.engine_reply import EngineError, EngineReply
from rollout.engine_versions import check_version
from rollout.served_engine import ServedBackend, new_request_id
from rollout.served_weights import saved_form
from rollout.vllm_backend import MIN_VERSION
from rollout.vllm_wire import vllm_capabilities, vllm_sampling, vllm_stop_reason

T = TypeVar("T")
IDLE_SECONDS = 0.02
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM reads these when it is imported: one process, and no threads pinned to cores that others use too."""


class VllmInProcess:
    """Implements `rollout.served_engine.EngineAdapter` over `vllm.v1.engine.llm_engine.LLMEngine`.

    `options` are vLLM's EngineArgs; capture, processed logprobs and our worker extension are set here.
    """

    in_process = True

    def __init__(self, model: EngineModel, options: Mapping[str, Any]) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "backend='vllm' needs vLLM 0.30 or newer in this environment: pip install vllm on a GPU machine; for a "
                "CPU see tests/engines/make_vllm_env.sh"
            )
        self.model, self._options = model, dict(options)
        self.max_sequence_tokens = model.max_positions
        self.capabilities = vllm_capabilities("vLLM", stop_strings=False, version_spans=False)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: dict[str, tuple[SampleRequest, Future[EngineReply]]] = {}
        self._version = 0
        self._engine: Any = None
        self._thread = threading.Thread(target=self._drive, name="moe-rollout-vllm", daemon=True)

    async def open(self) -> int:
        """Build the engine on the thread that will step it."""
        self._thread.start()
        await self._do(self._build)
        for song in await sing(self.generate, self.model.vocab_size, new_request_id):
            self.model.spec.check_routes(self.model.sites(song.layers, "probe"), name="probe")
        return 0

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
        self.capabilities = vllm_capabilities(f"vLLM {vllm.__version__}", stop_strings=False, version_spans=False)

    async def generate(self, request: SampleRequest, request_id: str) -> EngineReply:
        """Queue one sequence and wait for its end."""
        reply: Future[EngineReply] = Future()
        await self._do(lambda: self._add(request, request_id, reply))
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
        self._waiting[request_id] = request, reply

    async def abort(self, request_id: str) -> None:
        """End it now, with what it has."""
        await self._do(lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        """The synchronous engine drops the output of an abort, unless the request's state has a queue to put it."""
        processor, ended = self._engine.output_processor, _Ended()
        for internal in list(processor.external_req_ids.get(request_id, ())):
            if internal in processor.request_states:
                processor.request_states[internal].queue = ended
        self._engine.abort_request([request_id])
        for output in ended.outputs:
            self._finish(output)

    async def load_weights(self, source: Any, version: int) -> None:
        """A state dict goes to the worker as it is; a directory is read there."""
        await self._do(lambda: self._load(source, version))

    def _load(self, source: Any, version: int) -> None:
        if isinstance(source, Mapping):
            self._engine.model_executor.driver_worker.worker.load_tensors(saved_form(source, self.model).items())
        else:
            self._engine.collective_rpc("load_checkpoint", kwargs={"path": str(source)})
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM kept its prefix cache, rows of the old weights would be reused")
        self._version = version

    async def close(self) -> None:
        """Stop the thread and free the engine."""
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    async def _do(self, command: Callable[[], T]) -> T:
        """`command()` on the engine's thread, between two steps."""
        if not self._thread.is_alive():
            raise EngineError("vLLM's thread has ended; see the log, and start the engine again")
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(command())
            except Exception as error:
                done.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(done)

    def _drive(self) -> None:
        while self._run_commands():
            if self._engine is not None and self._engine.has_unfinished_requests():
                self._step()
        if self._engine is not None:
            self._engine.engine_core.shutdown()

    def _run_commands(self) -> bool:
        """Those that wait; a moment for one when there is nothing to step. False to stop."""
        idle = self._engine is None or not self._engine.has_unfinished_requests()
        try:
            command = self._commands.get(block=idle, timeout=IDLE_SECONDS if idle else None)
        except queue.Empty:
            return True
        if command is not None:
            command()
        return command is not None

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            waiting, self._waiting = self._waiting, {}
            for _, reply in waiting.values():
                reply.set_exception(EngineError(f"vLLM's engine failed: {type(error).__name__}: {error}"))
            raise
        for output in outputs:
            if output.finished:
                self._finish(output)

    def _finish(self, output: Any) -> None:
        request, reply = self._waiting.pop(output.request_id, (None, None))
        if request is not None and reply is not None and reply.set_running_or_notify_cancel():
            reply.set_result(_reply(request, output.outputs[0], self._version))


class _Ended:
    """Takes the outputs of aborted requests."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def put(self, output: Any) -> None:
        self.outputs.append(output)


def _reply(request: SampleRequest, sequence: Any, version: int) -> EngineReply:
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
        stop_reason=vllm_stop_reason(request, ids, sequence.finish_reason, sequence.stop_reason),
        versions=[(version, 0, len(ids))],
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
