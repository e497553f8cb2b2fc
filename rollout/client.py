"""RolloutClient: the front door. Sample, stream, record; the same in process and over Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from rollout.backend import Backend, Finished, ModelInfo, Recorder, SampleRequest
from rollout.requests import Prompt, RequestBuilder
from rollout.rewards import RewardFn, RewardRunner
from rollout.sampling import SamplingParams
from rollout.steps import Call, StepLedger
from storage.trace import Trace

logger = logging.getLogger(__name__)
MAX_PENDING_REWARDS = 64


class RolloutClient:
    """Samples from one model and commits the traces. A context manager; several threads may sample at once.

    >>> with RolloutClient.local("path/to/qwen3-moe", traces="traces/") as client:
    ...     traces = client.sample(["12+34="], num_samples=4, sampling_params=SamplingParams(max_tokens=8, seed=0))
    ...     traces[0].text, traces[0].routed_experts.shape
    ('46', (8, 8, 2))

    Without `traces=` nothing is written. `reward_fn(trace) -> float`, plain or `async`, runs before the commit.
    """

    def __init__(
        self,
        backend: Backend,
        recorder: Recorder | None = None,
        run: str = "run",
        reward_fn: RewardFn | None = None,
    ) -> None:
        _check_run(run)
        self._backend = backend
        self._recorder = recorder
        self._closed = False
        self._rewards = RewardRunner(reward_fn) if reward_fn is not None else None
        self._requests = RequestBuilder(backend.info, run, self._load_tokenizer)
        self._steps = StepLedger(recorder.committed_steps() if recorder else [], unique=recorder is not None)

    @classmethod
    def local(
        cls,
        model: str | Path,
        *,
        traces: str | Path | None = None,
        run: str = "run",
        reward_fn: RewardFn | None = None,
        **engine_options: Any,
    ) -> Self:
        """An engine in this process. `engine_options` are the fields of `rollout.config.EngineOptions`.

        Raises:
            FileNotFoundError, ValueError: the model or the dataset cannot be used; nothing was started.
        """
        from rollout.local_backend import LocalBackend
        from rollout.recorder import LocalRecorder

        _check_run(run)
        backend = LocalBackend(str(model), **engine_options)
        try:
            return cls(
                backend,
                LocalRecorder(traces, backend.info.spec) if traces is not None else None,
                run,
                reward_fn,
            )
        except BaseException:
            backend.close()
            raise

    @classmethod
    def ray(
        cls,
        model: str | Path,
        *,
        num_actors: int = 1,
        traces: str | Path | None = None,
        run: str = "run",
        reward_fn: RewardFn | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: dict[str, float] | None = None,
        runtime_env: dict[str, Any] | None = None,
        **engine_options: Any,
    ) -> Self:
        """The same over `num_actors` Ray actors with one engine each; traces go to a sink actor, not through here.

        The other arguments are Ray's, per actor. Ray must be initialised, or a local cluster is started.
        """
        import actors

        _check_run(run)
        backend = actors.connect(
            model,
            num_actors=num_actors,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            resources=resources,
            runtime_env=runtime_env,
            engine_options=engine_options,
        )
        try:
            recorder = actors.open_recorder(traces, backend.info.spec) if traces is not None else None
            return cls(backend, recorder, run, reward_fn)
        except BaseException:
            backend.close()
            raise

    @property
    def info(self) -> ModelInfo:
        """The loaded model: routing spec, vocabulary, longest sequence."""
        return self._backend.info

    @property
    def backend(self) -> Backend:
        """What generates: `LocalBackend` or `ActorPool`."""
        return self._backend

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        step: int | None = None,
        prompt_keys: Sequence[str] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> list[Trace]:
        """Sample `num_samples` completions of each prompt; traces in prompt order, the samples of a prompt together.

        A bare call is a step of its own, numbered after the last unless `step` is given, and is committed before it
        returns. Within `with client.step(n)` it is part of that step.

        Raises:
            ValueError, TypeError: a prompt or parameter does not fit, with its index; nothing was started.
            StepExistsError: the step is committed already; nothing was started.
        """
        call, requests = self._begin(prompts, num_samples, sampling_params, step, prompt_keys, metadata)
        traces = {trace.sample_id: trace for finished in self._run(call, requests) for trace in finished.traces()}
        return [traces[request.sample_id] for request in requests]

    async def sample_async(self, prompts: Sequence[Prompt], **arguments: Any) -> list[Trace]:
        """`sample` for asyncio: other coroutines run meanwhile, and may sample too."""
        return await asyncio.to_thread(lambda: self.sample(prompts, **arguments))

    def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        step: int | None = None,
        prompt_keys: Sequence[str] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
        as_refs: bool = False,
    ) -> Generator[Any, None, None]:
        """Yield traces as they finish; the step is committed after the last. Leaving early aborts and commits nothing.

        With `as_refs` (over Ray) yields references of Arrow tables, one or more traces each, and fetches nothing.
        """
        if as_refs and self._rewards is not None:
            raise ValueError("as_refs=True leaves the traces in the object store, reward_fn needs them here: use one")
        if as_refs and not self._backend.has_refs:
            raise ValueError("as_refs=True needs RolloutClient.ray: a local engine has no references")
        arguments = prompts, num_samples, sampling_params, step, prompt_keys, metadata
        call, _ = self._begin(*arguments)
        self._steps.cancel(call)  # claimed again with the first trace: a stream that nobody reads holds no step
        return self._stream(as_refs, *arguments)

    def _stream(self, as_refs: bool, *arguments: Any) -> Generator[Any, None, None]:
        call, requests = self._begin(*arguments)
        with contextlib.closing(self._run(call, requests)) as run:
            for finished in run:
                if as_refs:
                    yield finished.ref
                else:
                    yield from finished.traces()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Self]:
        """Gather the calls inside into one step, committed at the end; leaving by an exception commits nothing."""
        self._steps.open(step)
        committed = False
        try:
            yield self
            self._steps.check_complete()
            committed = self._commit(step)
        finally:
            self._steps.close(committed)
            if not committed and self._recorder is not None:
                self._recorder.abandon(step)

    def update_weights(self, source: Any, version: int) -> None:
        """Replace the weights everywhere; rows sampled from now on carry `version`.

        Args:
            source: a state dict with the names of `model.state_dict()`.
            version: above the current one, which starts at 0.

        Raises:
            ValueError: names, shapes or version do not fit; the old weights stay.
            RuntimeError: samples are running.
        """
        self._backend.update_weights(source, version)

    def close(self) -> None:
        """Stop the engine; what was not committed is abandoned, calls that still run in other threads fail."""
        self._closed = True
        self._backend.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._rewards is not None:
            self._rewards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load_tokenizer(self) -> Any:
        from rollout.loader import load_tokenizer

        return load_tokenizer(str(self.info.tokenizer_path))

    def _begin(
        self, prompts: Any, num_samples: int, params: Any, step: int | None, keys: Any, facts: Any
    ) -> tuple[Call, list[SampleRequest]]:
        call = self._steps.begin(step)
        try:
            requests = self._requests.build(prompts, num_samples, params, call.step, call.number, keys, facts)
        except BaseException:
            self._steps.cancel(call)
            raise
        return call, requests

    def _run(self, call: Call, requests: list[SampleRequest]) -> Generator[Finished, None, None]:
        """Stream, reward, record, commit: the one path of every call."""
        done = False
        try:
            with contextlib.closing(self._rewarded(self._backend.stream(requests))) as stream:
                for finished, rewards in stream:
                    if self._recorder is not None:
                        self._recorder.write(finished, call.step, rewards)
                    yield finished
            if self._closed:
                raise RuntimeError(f"the client was closed while step {call.step} was sampled; nothing was committed")
            done = self._commit(call.step) if call.commits else True
        finally:
            if call.commits and not done and self._recorder is not None:
                self._recorder.abandon(call.step)
            self._steps.end(call, done)

    def _commit(self, step: int) -> bool:
        if self._recorder is None:
            return True
        committed = self._recorder.commit(step)
        if not committed:
            logger.warning("step %d holds no trace to commit", step)
        return committed

    def _rewarded(
        self, stream: Generator[Finished, None, None]
    ) -> Generator[tuple[Finished, dict[str, float] | None], None, None]:
        """Each finished chunk with its rewards by sample_id, as soon as these are known."""
        pending: deque[tuple[Finished, dict[str, Future[float]]]] = deque()
        with contextlib.closing(stream):
            for finished in stream:
                if self._rewards is None:
                    yield finished, None
                    continue
                scored = [trace for trace in finished.traces() if trace.finish_reason != "error"]
                pending.append((finished, {trace.sample_id: self._rewards.start(trace) for trace in scored}))
                while pending and (len(pending) > MAX_PENDING_REWARDS or all(f.done() for f in pending[0][1].values())):
                    yield _await_rewards(*pending.popleft())
            while pending:
                yield _await_rewards(*pending.popleft())


def _check_run(run: str) -> None:
    if not run or "/" in run:
        raise ValueError(f"run {run!r} must be a name without '/'; it becomes a part of every sample_id")


def _await_rewards(finished: Finished, futures: dict[str, Future[float]]) -> tuple[Finished, dict[str, float]]:
    rewards = {sample_id: future.result() for sample_id, future in futures.items()}
    for trace in finished.traces():
        trace.reward = rewards.get(trace.sample_id, trace.reward)
    return finished, rewards
