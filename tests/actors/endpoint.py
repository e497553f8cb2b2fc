"""What a node's metrics endpoint says, for Prometheus and for tests."""

from __future__ import annotations

import re
from typing import Any
from urllib.request import urlopen

import ray

LINE = re.compile(r'^ray_moe_rollout_(\w+)\{.*?WorkerId="(\w+)".*?\} (\S+)$', re.MULTILINE)


def worker_of(actor: Any) -> str:
    """The id that Ray labels the series of an actor with."""
    return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_worker_id()))


def published(*workers: str) -> dict[str, float]:
    """Each `ray_moe_rollout_` metric, without that prefix, summed over these workers; histograms by their parts."""
    (node,) = (node for node in ray.nodes() if node["Alive"])
    with urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for name, worker, value in LINE.findall(text):
        if worker in workers and not name.endswith("_bucket"):
            found[name] = found.get(name, 0.0) + float(value)
    return found
