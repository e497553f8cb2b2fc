"""The pipeline's TOML file, checked by name before Ray or torch is imported."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from rollout.config import EngineOptions
from rollout.sampling import SamplingParams, StrictModel


class ActorOptions(StrictModel):
    """The `[actors]` table: how many engines and trace writers; Ray's resources for each engine, or rank of a group."""

    num_actors: int = Field(2, ge=1)
    num_sinks: int = Field(1, ge=1)
    num_cpus: float = Field(1, ge=0)
    num_gpus: float = Field(0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    runtime_env: dict[str, Any] = Field(default_factory=dict)


class PipelineConfig(StrictModel):
    """A run: S steps of P prompts with N samples each.

    >>> load_config("examples/pipeline.toml").steps
    4

    Attributes:
        model: local path or hub id.
        traces: directory of the dataset. In a Ray job it must be absolute: the job runs in a copy of the working
            directory that Ray deletes.
        run: first part of every sample_id.
        steps: steps 0 .. steps - 1; those that are committed or were dropped (`keep_from`) are skipped.
        prompts: JSONL or Parquet with `prompt` (text) or `prompt_ids` (list of ids), and optionally `key`.
        prompts_per_step: taken in the file's order, from the start again after its end.
        num_samples: completions per prompt.
        on_error: what a sample that ends in an error does to its step. "stop" ends the run before the commit; "skip"
            logs it and commits the step without it.
        sampling, engine, actors: tables; see SamplingParams, EngineOptions, ActorOptions.

    A relative path counts from the folder of the config file; `~` is the home directory. `model` is a path when that
    exists.
    """

    model: str
    traces: str
    prompts: str
    run: str = Field("run", pattern=r"^[^/]+$")
    steps: int = Field(ge=1)
    prompts_per_step: int = Field(ge=1)
    num_samples: int = Field(1, ge=1)
    on_error: Literal["stop", "skip"] = "stop"
    sampling: SamplingParams = SamplingParams()
    engine: EngineOptions = EngineOptions()
    actors: ActorOptions = ActorOptions()


class ConfigError(ValueError):
    """The config file or the prompts file is wrong; the message says which key or line."""


def load_config(path: str | Path, environ: Mapping[str, str] = os.environ) -> PipelineConfig:
    """Read and check a config file; its paths come back absolute.

    Raises:
        ConfigError: naming the file and the key.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text())
        config = PipelineConfig(**values)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path.absolute()} does not exist; examples/pipeline.toml in the repository is one to start from"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {_readable(error)}") from error
    return _with_absolute_paths(config, path, environ)


def _readable(error: ValidationError) -> str:
    """All problems in one line: `num_sample: unknown PipelineConfig key ...; steps: Field required`."""
    return "; ".join(
        ": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, "))))
        for item in error.errors()
    )


def _with_absolute_paths(config: PipelineConfig, path: Path, environ: Mapping[str, str]) -> PipelineConfig:
    folder = path.resolve().parent

    def absolute(value: str) -> str:
        return value if "://" in value else str((folder / Path(value).expanduser()).resolve())

    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ and _is_below(absolute(config.traces), Path.cwd()):
        raise ConfigError(
            f"{path}: traces = {config.traces!r} lies in the Ray job's copy of the working directory, "
            "which Ray deletes; give an absolute path"
        )
    model = absolute(config.model)
    update = {"traces": absolute(config.traces), "prompts": absolute(config.prompts)}
    return config.model_copy(update={**update, "model": model if Path(model).exists() else config.model})


def _is_below(traces: str, folder: Path) -> bool:
    return "://" not in traces and Path(traces).is_relative_to(folder.resolve())
