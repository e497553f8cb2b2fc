"""`python -m actors.pipeline --config run.toml`: prompts in, S committed steps of traces out, resumable."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from actors.config import ConfigError, PipelineConfig, load_config
from actors.progress import Progress
from actors.prompts import Prompt, prompts_of_step, read_prompts
from storage.catalog import committed_steps
from storage.dataset import TraceDataset
from storage.lease import Lease
from storage.retention import first_kept_step
from storage.store import is_remote, open_store
from storage.trace import Trace

logger = logging.getLogger("actors.pipeline")
LEASE_WAIT_S = 2.0  # for one that is just ending


def ray_client(config: PipelineConfig) -> Any:
    """The client that a config describes."""
    from rollout.client import RolloutClient

    return RolloutClient.ray(
        config.model,
        traces=config.traces,
        run=config.run,
        run_config=config.model_dump(mode="json", exclude={"model", "run", "actors", "engine"}),
        **config.actors.model_dump(),
        **config.engine.model_dump(),
    )


def run(config: PipelineConfig, make_client: Callable[[PipelineConfig], Any] = ray_client) -> list[int]:
    """Sample and commit every step that the dataset does not hold yet; return the steps done now.

    >>> run(load_config("examples/pipeline.toml"))
    [0, 1, 2, 3]

    Raises:
        DatasetInUseError: another pipeline is at work on the same dataset.
    """
    with _lease(config):
        return _run_missing(config, make_client)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM, which `ray job stop` sends, ends the run as an error would: the step under way is abandoned."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals go to the main thread alone
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the clean-up
    logger.warning("stopped by SIGTERM: the step under way is abandoned, another run goes on from it")
    raise SystemExit(128 + number)


def _lease(config: PipelineConfig) -> contextlib.AbstractContextManager[Any]:
    """Object stores have no locks; there the conditional put of each commit has to do."""
    if is_remote(config.traces):
        return contextlib.nullcontext()
    return Lease(config.traces, owner=f"pipeline, run {config.run!r}", wait_s=LEASE_WAIT_S)


def _run_missing(config: PipelineConfig, make_client: Callable[[PipelineConfig], Any]) -> list[int]:
    prompts = read_prompts(config.prompts)
    batches = {step: prompts_of_step(prompts, step, config.prompts_per_step) for step in _missing_steps(config)}
    if batches:
        _check_same_run(config)
    logger.info("%s: %d of %d steps to do", config.traces, len(batches), config.steps)
    if batches:
        with make_client(config) as client, _stopped_by_sigterm():  # behind ray.init, which sets a handler of its own
            for step, batch in batches.items():
                _run_step(client, config, step, batch)
    return list(batches)


def _missing_steps(config: PipelineConfig) -> list[int]:
    """Neither committed nor dropped by `TraceDataset.keep_from`."""
    committed = set(committed_steps(config.traces))
    first = first_kept_step(open_store(config.traces))
    return [step for step in range(first, config.steps) if step not in committed]


def _check_same_run(config: PipelineConfig) -> None:
    """Refuse to go on with other sampling parameters than the dataset was begun with; other actors are fine."""
    steps = committed_steps(config.traces)
    before = next(TraceDataset(config.traces).iter(step=steps[-1]), None) if steps else None
    if before is None or not before.sampling_params:
        return
    now = config.sampling.model_dump(mode="json")
    changed = {
        key: f"{before.sampling_params.get(key)} -> {value}"
        for key, value in now.items()
        if before.sampling_params.get(key) != value and not (key == "seed" and value is None)
    }
    if (run := before.sample_id.partition("/")[0]) != config.run:
        changed["run"] = f"{run} -> {config.run}"
    if changed:
        raise ConfigError(
            f"{config.traces} was begun with another configuration: {changed}; restore it, or choose another directory"
        )


def _run_step(client: Any, config: PipelineConfig, step: int, prompts: Sequence[Prompt]) -> None:
    """Sample one step; it is committed when its stream ends. A sample that failed ends it, or is left out of it."""
    started, tokens, failed, samples = time.monotonic(), 0, 0, len(prompts) * config.num_samples
    stream = client.stream(
        [prompt.prompt for prompt in prompts],
        num_samples=config.num_samples,
        sampling_params=config.sampling,
        step=step,
        prompt_keys=[prompt.key for prompt in prompts],
    )
    with contextlib.closing(stream), Progress(samples, f"step {step}") as progress:
        for trace in stream:
            if trace.finish_reason == "error":
                failed += 1
                _report(trace, config)
            tokens += len(trace.completion_ids)
            progress.update()
    seconds = time.monotonic() - started
    if failed == samples:
        logger.warning("step %d: every sample failed, so there is nothing to commit; a later run tries it again", step)
        return
    logger.info("step %d: %d samples, %.0f completion tokens/s, committed", step, samples - failed, tokens / seconds)


def _report(trace: Trace, config: PipelineConfig) -> None:
    """Log a sample that failed, or raise when the config does not say that it may be skipped."""
    key = trace.sample_id.split("/")[2]
    what = f"sample {trace.sample_id} failed: {trace.error}"
    if config.on_error == "stop":
        raise RuntimeError(
            f"step {trace.step} is not committed: {what}. Another run with the same seed meets it again: correct or "
            f"remove the prompt with key {key!r} in {config.prompts}, change the options that the error names, or set "
            'on_error = "skip" to commit steps without such samples'
        )
    logger.warning("%s; step %d goes on without it", what, trace.step)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Ends with exit code 1 and one line when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m actors.pipeline", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML, see examples/pipeline.toml")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        done = run(load_config(options.config))
    except Exception as error:
        if options.traceback:
            raise
        parser.exit(1, f"error: {' '.join(str(error).split())}\n")
    logger.info("done: %d steps in this run", len(done))


if __name__ == "__main__":
    main()
