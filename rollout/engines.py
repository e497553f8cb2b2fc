"""Engines by name. Each is imported when it is asked for."""

from __future__ import annotations

from typing import Any

from rollout.served_engine import ServedBackend


def connect_engine(backend: str, url: str, model: str, **options: Any) -> ServedBackend:
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
