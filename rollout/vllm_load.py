"""How new weights reach the workers of vLLM's engine in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.engine_model import EngineModel
from rollout.served_weights import saved_directory, saved_form


def load(engine: Any, source: Any, model: EngineModel) -> None:
    """A state dict goes to the worker of this process as it is; where workers are processes of their own, as with
    `tensor_parallel_size=2`, through a temporary directory. A directory is read by the workers."""
    if not isinstance(source, Mapping):
        engine.collective_rpc("load_checkpoint", kwargs={"path": str(source)})
    elif (here := getattr(engine.model_executor, "driver_worker", None)) is not None:
        here.worker.load_tensors(saved_form(source, model).items())
    else:
        with saved_directory(source, model) as folder:
            engine.collective_rpc("load_checkpoint", kwargs={"path": folder})
