"""Engines by name. Each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.backend import Backend
from rollout.config import EngineOptions
from rollout.native_build import loading_beside

OWN = "moe-rollout"


def check_engine_options(options: Mapping[str, Any]) -> None:
    """ValueError for an unknown engine, or an unknown option of our own; the others check theirs when they start."""
    backend = options.get("backend", OWN)
    if backend == OWN:
        EngineOptions(**{name: value for name, value in options.items() if name != "backend"})
    elif backend not in ("vllm", "sglang"):
        raise ValueError(f"backend is {backend!r}, need {OWN!r}, 'vllm' or 'sglang'")


def start_engine(model: str, *, backend: str = OWN, **options: Any) -> Backend:
    """An engine in this process.

    >>> start_engine("rollout/tiny_moe", dtype="float32").info.vocab_size
    38

    Args:
        backend: "moe-rollout", "vllm" or "sglang"; `options` are EngineOptions, vLLM's EngineArgs or
            SGLang's ServerArgs.

    Raises:
        ValueError, FileNotFoundError: the options or the model cannot be used.
        ImportError: the engine is not installed.
    """
    check_engine_options({"backend": backend, **options})
    if backend == "vllm":
        from rollout.vllm_in_process import start_vllm

        return start_vllm(model, **options)
    if backend == "sglang":
        from rollout.sglang_engine import start_sglang

        return start_sglang(model, **options)
    ours = EngineOptions(**options)
    if ours.dp_size > 1:
        from rollout.group_backend import GroupBackend

        return GroupBackend(model, **options)
    with loading_beside(ours.native_kernels, ours.device):
        from rollout.local_backend import LocalBackend  # with torch and transformers

        return LocalBackend(model, **options)


def connect_engine(backend: str, url: str, model: str, **options: Any) -> Backend:
    """The Backend over a running server.

    >>> connect_engine("sglang", "http://gpu-node:30000", "Qwen/Qwen3-30B-A3B", api_key="k")

    Raises:
        ValueError: no such engine.
    """
    if backend == "vllm":
        from rollout.vllm_backend import connect_vllm

        return connect_vllm(url, model, **options)
    if backend == "sglang":
        from rollout.sglang_backend import connect_sglang

        return connect_sglang(url, model, **options)
    raise ValueError(f"backend is {backend!r}, need 'vllm' or 'sglang'")
