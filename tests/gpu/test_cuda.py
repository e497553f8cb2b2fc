"""The engine on a CUDA device gives what it gives on a CPU, with and without graphs, and never waits unasked."""

from __future__ import annotations

import pytest
import torch

from rollout.device import open_stream
from tests.engine_results import assert_alike
from tests.sim.engines import FAMILIES, build, growing_workload, mixed_workload, on_cpu, outcomes, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WORKLOADS = {"mixed": (mixed_workload, {}), "yields": (growing_workload, {"kv_tokens": 48})}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("recording", [True, False], ids=["recording", "recording off"])
@pytest.mark.parametrize("without_graphs", [False, True], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_the_cpus(tmp_path, family, without_graphs, recording, workload):
    path = tiny(family, tmp_path)
    run, options = WORKLOADS[workload]
    options = {"enable_return_routed_experts": recording, **options}
    cpu = on_cpu(path, **options)
    expected = outcomes(run(cpu))
    cpu.built.close()
    rig = build(path, open_stream("cuda", 1), disable_cuda_graph=without_graphs, **options)
    run(rig)  # kernels are loaded and graphs recorded
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = outcomes(run(rig))
    finally:
        torch.cuda.set_sync_debug_mode("default")
        rig.built.close()
    assert_alike(found, expected, tolerance=1e-3)
