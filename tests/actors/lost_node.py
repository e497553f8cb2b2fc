"""The node of a group of ranks is lost while it samples; a program of its own, since it starts a cluster of two nodes.

    python -m tests.actors.lost_node [--another]

Prints one line of JSON: how many samples came, how many of them differ, and the error that ended the stream, if any.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from tests.actors.fakes import make_requests
from tests.actors.test_placement import pool_of

NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


def main(another: bool) -> None:
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    found: dict[str, Any] = {"samples": 0, "different": 0, "error": None}
    pool = pool_of(1, dp_size=2, num_cpus=1, placement_seconds=60 if another else 10)
    names: list[str] = []
    try:
        for finished in pool.stream(make_requests(10, 2, milliseconds=200)):
            if not names:
                os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
                cluster.remove_node(node, allow_graceful=False)
                if another:
                    cluster.add_node(**NODE)
            names += [trace.sample_id for trace in finished.traces()]
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    pool.close()
    print(json.dumps({**found, "samples": len(names), "different": len(set(names))}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main("--another" in sys.argv)
