"""RolloutClient: the front door. Sample, stream, record; the same in process and over Ray."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from rollout.backend import Backend, ModelInfo, PauseMode, Recorder, Start
from rollout.call import Parties, RunningCall
from rollout.figures import Figures
from rollout.reporting import OnStats, Reporter
from rollout.requests import CheckedCall, Prompt, RequestBuilder
from rollout.rewards import RewardFn, RewardRunner
from rollout.sampling import SamplingParams
from rollout.score import Score, Sequences, run_scores, score_requests
from rollout.session import Session
from rollout.start import ResumedCall
from rollout.steps import StepLedger
from rollout.threads import in_thread
from rollout.update_modes import InFlight, KVMode
from storage.promises import Promises
from storage.trace import RoutingSpec, Trace


class RolloutClient:
    """Samples from one model and commits the traces. A context manager; several threads may sample at once.

    >>> with RolloutClient.local("path/to/qwen3-moe", traces="traces/") as client:
    ...     traces = client.sample(["12+34="], num_samples=4, sampling_params=SamplingParams(max_tokens=8, seed=0))
    ...     traces[0].completion_ids, traces[0].routed_experts.shape
    ([7, 9, 1], (8, 8, 2))

    Without `traces=` nothing is written. `reward_fn(trace) -> float`, plain or `async`, runs before the commit,
    `on_stats(figures)` behind each step, with what `stats()` returns; rollout/loggers.py has some.
    """

    def __init__(
        self,
        backend: Backend,
        recorder: Recorder | None = None,
        run: str = "run",
        reward_fn: RewardFn | None = None,
        on_stats: OnStats | None = None,
    ) -> None:
        _check_run(run)
        self._parties = Parties(
            backend=backend,
            recorder=recorder,
            rewards=RewardRunner(reward_fn) if reward_fn is not None else None,
            steps=StepLedger(recorder.taken_steps if recorder else list, unique=recorder is not None),
            closed=threading.Event(),
            reporter=Reporter(backend.figures, on_stats),
        )
        self._requests = RequestBuilder(backend.info, run, self._load_tokenizer)

    @classmethod
    def local(
        cls,
        model: str | Path,
        *,
        traces: str | Path | None = None,
        run: str = "run",
        reward_fn: RewardFn | None = None,
        run_config: Mapping[str, Any] | None = None,
        on_stats: OnStats | None = None,
        **engine_options: Any,
    ) -> Self:
        """An engine in this process. `engine_options` are the fields of `rollout.config.EngineOptions`; with
        `backend="vllm"` they are vLLM's EngineArgs. A dataset that is created here notes them in its run.json, and
        `run_config` (JSON values, the trainer's for example), without what looks like a secret.

        Raises:
            FileNotFoundError, ValueError: the model or the dataset cannot be used; nothing was started.
        """
        from rollout.engines import start_engine
        from rollout.recorder import LocalRecorder
        from rollout.run_facts import run_facts

        _check_run(run)
        backend = start_engine(str(model), **engine_options)
        try:
            facts = run_facts(backend, model, run, engine_options, run_config)
            recorder = LocalRecorder(traces, *_dataset_facts(backend), facts) if traces is not None else None
            return cls(backend, recorder, run, reward_fn, on_stats)
        except BaseException:
            backend.close()
            raise

    @classmethod
    def ray(
        cls,
        model: str | Path,
        *,
        num_actors: int = 1,
        num_sinks: int = 1,
        traces: str | Path | None = None,
        run: str = "run",
        reward_fn: RewardFn | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: dict[str, float] | None = None,
        runtime_env: dict[str, Any] | None = None,
        run_config: Mapping[str, Any] | None = None,
        on_stats: OnStats | None = None,
        **engine_options: Any,
    ) -> Self:
        """The same over `num_actors` Ray actors with one engine each; traces go to a sink actor, not through here.

        `num_sinks` of them share the writing when one cannot keep up (docs/sizing.md); a step still is one commit. The
        other arguments are Ray's, per actor; with `dp_size=N` an engine is a group of N ranks on one node, and they
        count per rank. Ray must be initialised, or a local cluster is started.

        Raises:
            ValueError: the model, the dataset or an option cannot be used, or the cluster can never hold the actors.
            RuntimeError: a group found no node with room for all its ranks in time.
        """
        import actors
        from rollout.run_facts import run_facts

        _check_run(run)
        if not isinstance(num_sinks, int) or num_sinks < 1:
            raise ValueError(f"num_sinks is {num_sinks!r}, need an integer from 1")
        wanted: dict[str, Any] = {
            "num_actors": num_actors,
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "resources": resources,
            "runtime_env": runtime_env,
        }
        backend = actors.connect(model, **wanted, engine_options=engine_options)
        try:
            facts = run_facts(backend, model, run, engine_options, run_config, actors=wanted | {"num_sinks": num_sinks})
            where = _dataset_facts(backend)
            recorder = actors.open_recorder(traces, *where, facts, num_sinks) if traces is not None else None
            return cls(backend, recorder, run, reward_fn, on_stats)
        except BaseException:
            backend.close()
            raise

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        backend: str,
        model: str | Path,
        api_key: str | None = None,
        traces: str | Path | None = None,
        run: str = "run",
        reward_fn: RewardFn | None = None,
        run_config: Mapping[str, Any] | None = None,
        on_stats: OnStats | None = None,
        **options: Any,
    ) -> Self:
        """A vLLM or SGLang server that runs already.

        Args:
            backend: "vllm" or "sglang"; `options` are those of `connect_vllm` and `connect_sglang`.
            model: where config and tokenizer of the served checkpoint are.

        Raises:
            EngineError, ValueError: the server cannot be used; the message says what to start it with.
        """
        from rollout.engines import connect_engine
        from rollout.recorder import LocalRecorder
        from rollout.run_facts import run_facts

        _check_run(run)
        served = connect_engine(backend, url, str(model), api_key=api_key, **options)
        try:
            engine = {"backend": backend, **options}
            facts = run_facts(served, model, run, engine, run_config, url=url)
            recorder = LocalRecorder(traces, *_dataset_facts(served), facts) if traces is not None else None
            return cls(served, recorder, run, reward_fn, on_stats)
        except BaseException:
            served.close()
            raise

    @property
    def info(self) -> ModelInfo:
        """The loaded model: routing spec, vocabulary, longest sequence."""
        return self._parties.backend.info

    def stats(self) -> Figures:
        """What runs and waits, tokens, times, pool, commits: numbers by name, see rollout/figures.py.

        Over Ray those of all actors together; each node's metrics endpoint has them too, as `ray_moe_rollout_<name>`.

        >>> client.stats()["tokens_sampled_total"], client.stats()["weight_version"]
        (1432, 0)
        """
        self._check_open()
        return self._parties.reporter.stats()

    @property
    def backend(self) -> Backend:
        """What generates: `LocalBackend` or `ActorPool`."""
        return self._parties.backend

    def sample(
        self,
        prompts: Sequence[Prompt] | None = None,
        *,
        resume: Sequence[Trace] | None = None,
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        step: int | None = None,
        prompt_keys: Sequence[str] | None = None,
        metadata: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        routed_experts_start_len: int | Sequence[int] = 0,
    ) -> list[Trace]:
        """Sample `num_samples` completions of each prompt; traces in prompt order, the samples of a prompt together.

        A bare call is a step of its own, numbered after the last unless `step` is given, and is committed before it
        returns. Within `with client.step(n)` it is part of that step.

        With `resume=` instead of prompts, recorded traces that ended with "abort" or "length" go on: the tokens they
        have are computed again under replay of their rows, and each comes back as one trace, with the old logprobs and
        weight versions. `max_tokens` counts the whole completion. The sample is a new one of this step: `run/4/3.0-0/1`
        goes on where `run/3/0-0/1` ended, in its group and with its random numbers.

        `routed_experts_start_len` leaves out the rows below that position, which an earlier turn delivered.

        Raises:
            ValueError, TypeError: a prompt or parameter does not fit, with its index; nothing was started.
            StepExistsError: the step is committed already; nothing was started.
        """
        asked = num_samples, sampling_params, prompt_keys, metadata, routed_experts_start_len
        checked = self._checked(prompts, resume, *asked)
        return self._begin(checked, step).collect()

    async def sample_async(
        self,
        prompts: Sequence[Prompt] | None = None,
        *,
        resume: Sequence[Trace] | None = None,
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        step: int | None = None,
        prompt_keys: Sequence[str] | None = None,
        metadata: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        routed_experts_start_len: int | Sequence[int] = 0,
    ) -> list[Trace]:
        """`sample` for asyncio: other coroutines run meanwhile, and may sample too.

        Steps and calls are numbered in the order in which the coroutines start. Cancelling aborts and commits nothing.
        """
        asked = num_samples, sampling_params, prompt_keys, metadata, routed_experts_start_len
        checked = self._checked(prompts, resume, *asked)
        running = self._begin(checked, step)
        return await in_thread(running.collect, name="moe-rollout-sample", on_cancel=running.abort)

    def stream(
        self,
        prompts: Sequence[Prompt] | None = None,
        *,
        resume: Sequence[Trace] | None = None,
        num_samples: int = 1,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        step: int | None = None,
        prompt_keys: Sequence[str] | None = None,
        metadata: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        routed_experts_start_len: int | Sequence[int] = 0,
        as_refs: bool = False,
    ) -> Generator[Any, None, None]:
        """Yield traces as they finish; the step is committed after the last. Leaving early aborts and commits nothing.

        With `as_refs` (over Ray) yields references of Arrow tables, one or more traces each, and fetches nothing.
        """
        if as_refs and self._parties.rewards is not None:
            raise ValueError("as_refs=True leaves the traces in the object store, reward_fn needs them here: use one")
        if as_refs and not self._parties.backend.has_refs:
            raise ValueError("as_refs=True needs RolloutClient.ray: a local engine has no references")
        asked = num_samples, sampling_params, prompt_keys, metadata, routed_experts_start_len
        checked = self._checked(prompts, resume, *asked)
        self._parties.steps.check(step)
        return self._stream(checked, step, self._parties.steps.open_step, as_refs)

    def _stream(
        self, checked: CheckedCall | ResumedCall, step: int | None, inside: int | None, as_refs: bool
    ) -> Generator[Any, None, None]:
        """The step is claimed here, with the first trace: a stream that nobody reads holds none."""
        if self._parties.steps.open_step != inside:
            where = f"inside `with client.step({inside})`" if inside is not None else "outside of a step"
            raise RuntimeError(f"this stream was made {where} and is first read elsewhere; read it there")
        with contextlib.closing(self._begin(checked, step).finished()) as run:
            for finished in run:
                if as_refs:
                    yield finished.ref
                else:
                    yield from finished.traces()

    def score(
        self, sequences: Sequences, *, replay: bool = False, sampling_params: SamplingParams | None = None
    ) -> list[Score]:
        """Logprobs and routes of given tokens under the current weights; nothing is sampled or written.

        Args:
            sequences: traces, or token ids.
            replay: make each token take the experts that its trace recorded, instead of those the model chooses now.
            sampling_params: whose distribution `Score.logprobs` are under; default: the model's own.

        Raises:
            ValueError, TypeError: a sequence does not fit or has no routes to replay, with its index.
        """
        self._check_open()
        requests = score_requests(self._requests, sequences, sampling_params or SamplingParams(), replay)
        return run_scores(self._parties.backend, requests, sequences)

    def session(self, sampling_params: SamplingParams | None = None) -> Session:
        """A conversation of several turns; see rollout/session.py.

        Raises:
            ValueError: this client records no routes, or the model's routers cannot repeat them.
        """
        if not self.info.captures_routes or self.info.not_forced:
            why = self.info.not_forced or "it records no routes (enable_return_routed_experts=False)"
            raise ValueError(f"a session needs an engine that can repeat recorded routes: {why}")

        def sample(
            tokens: Prompt, start: Start | None, params: SamplingParams | None, step: int | None, facts: Any
        ) -> Trace:
            rows = 0 if start is None else len(start.routed_experts)
            own = params or sampling_params
            checked = self._requests.check([tokens], 1, own, None, facts, rows, [start])
            return self._begin(checked, step).collect()[0]

        return Session(sample, self._requests.tokenize)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[Self]:
        """Gather the calls inside into one step, committed at the end; leaving by an exception commits nothing."""
        steps, committed = self._parties.steps, False
        steps.open(step)
        try:
            yield self
            steps.check_complete()
            committed = self._parties.commit(step)
        finally:
            self._parties.end_step(step, committed)
        if committed:
            self._parties.reporter.step_ended(step)

    def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling everywhere; returns when no forward is under way. Calls made meanwhile wait for `resume`.

        Args:
            mode: "keep": what runs stays where it is. "wait": what has begun ends first. "abort": everything ends now;
                a trace of k delivered tokens has its P + k - 1 rows and can be continued with `sample(resume=)`.
                "yield": what runs gives up its keys and values, and recomputes them under replay afterwards.
        """
        self._check_open()
        self._parties.backend.pause(mode)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._check_open()
        self._parties.backend.resume()

    def abort(self, sample_ids: Sequence[str] | Literal["all"]) -> None:
        """End samples that wait or run, from any thread. The call that asked for them returns them as they are.

        Raises:
            ValueError: one of them is not known, or its trace was taken; nothing is aborted.
        """
        self._check_open()
        self._parties.backend.abort(sample_ids)

    def update_weights(
        self,
        source: Any,
        version: int,
        *,
        force: bool = False,
        in_flight: InFlight = "wait",
        kv: KVMode = "keep",
        check_finite: bool = False,
    ) -> None:
        """Replace the weights everywhere, between two steps; rows sampled from now on carry `version`.

        Args:
            source: a state dict; a directory of safetensors files; or an iterator of `(name, tensor)` or of buckets of
                these, such as `rollout.weight_transfer.receive_weights` and `full_tensors`. Names are those of
                `model.state_dict()` or those that transformers saves.
            version: above the current one, which starts at 0.
            force: take any version, also one that goes back.
            in_flight: what becomes of requests that have begun. "wait": they end under the old weights first. "abort":
                they end now, with finish_reason "abort" and the tokens they have. "keep": they go on under the new
                weights, and `Trace.weight_versions` says which rows are whose. Others begin with the new weights.
            kv: with "keep", their cached keys and values stay those of the old weights ("keep"), or are computed again
                under replay of the rows recorded so far ("recompute").
            check_finite: refuse NaN and infinite values.

        Raises:
            ValueError, FileNotFoundError: names, shapes, values or version do not fit; the old weights go on serving.
            RuntimeError: another update is under way, or the engine sleeps.
        """
        self._check_open()
        self._parties.backend.update_weights(
            source, version, force=force, in_flight=in_flight, kv=kv, check_finite=check_finite
        )

    def sleep(self, level: int = 1, *, in_flight: Literal["wait", "abort"] = "wait") -> None:
        """Free weights and key/value pool on the device, for a trainer that shares it. Sampling raises until `wake`.

        Args:
            level: 1 keeps a copy of the weights in host memory, 2 keeps none. (On a CPU, level 1 frees the pool only.)
            in_flight: "wait" lets requests that have begun end first, "abort" ends them now. Others wait for `wake`.
        """
        self._check_open()
        self._parties.backend.sleep(level, in_flight=in_flight)

    def wake(
        self, source: Any = None, version: int | None = None, *, force: bool = False, check_finite: bool = False
    ) -> None:
        """Undo `sleep`, with the weights from before or, required after level 2, new ones as in `update_weights`.

        Raises:
            ValueError, FileNotFoundError: the weights do not fit, or are missing; the engine sleeps on.
            RuntimeError: the engine does not sleep.
        """
        self._check_open()
        self._parties.backend.wake(source, version, force=force, check_finite=check_finite)

    def close(self) -> None:
        """Stop the engine; what was not committed is abandoned, calls that still run in other threads fail."""
        self._parties.closed.set()
        with contextlib.ExitStack() as parties:  # each is closed, also when one before it could not be
            if self._parties.rewards is not None:
                parties.callback(self._parties.rewards.close)
            if self._parties.recorder is not None:
                parties.callback(self._parties.recorder.close)
            parties.callback(self._parties.backend.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(
        self, prompts: Sequence[Prompt] | None, resume: Sequence[Trace] | None, *asked: Any
    ) -> CheckedCall | ResumedCall:
        if resume is None:
            return self._requests.check(prompts or (), *asked)
        num_samples, sampling_params, *others = asked
        if prompts is not None or num_samples != 1 or any(others):
            raise ValueError("resume= takes sampling_params and step only: prompts and all else are the traces' own")
        return self._requests.check_resume(resume, sampling_params)

    def _load_tokenizer(self) -> Any:
        from rollout.loader import load_tokenizer

        return load_tokenizer(str(self.info.tokenizer_path), self.info.trust_remote_code)

    def _begin(self, checked: CheckedCall | ResumedCall, step: int | None) -> RunningCall:
        self._check_open()
        call = self._parties.steps.begin(step)
        return RunningCall(self._parties, call, checked.requests(call.step, call.number))

    def _check_open(self) -> None:
        if self._parties.closed.is_set():
            raise RuntimeError("this client is closed; make a new one")


def _dataset_facts(backend: Backend) -> tuple[RoutingSpec, Promises]:
    able = backend.info.capabilities
    return backend.info.spec, Promises(able.frozen_recompute, able.slot_order)


def _check_run(run: str) -> None:
    if not run or "/" in run or not run.isprintable():
        raise ValueError(f"run {run!r} must be a printable name without '/'; it becomes a part of every sample_id")
