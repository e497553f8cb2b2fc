"""vLLM's CPU worker, able to compute a prompt in parts for a request with a seed. Imported by vLLM alone, by name.

Start vLLM on a CPU with `worker_cls="rollout.vllm_cpu_worker.SeededCpuWorker"`; other platforms need nothing.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class SeededCpuWorker(CPUWorker):
    """Draws nothing from the random stream of a request whose prompt is not computed to its end.

    vLLM 0.30 draws a token for it as well, drops it, and rewinds the stream by torch.Generator.set_offset
    (gpu_model_runner.py, `_bookkeeping_sync`), which a CPU generator refuses: "CPU Generator does not use offset" ends
    the engine with every request in it.
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; the streams of unfinished prompts are put aside meanwhile."""
        runner = self.model_runner
        streams = runner.input_batch.generators
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        aside = {row: streams.pop(row) for row in map(int, unfinished) if row in streams}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            streams.update(aside)
