"""Runs inside vLLM's workers: load a checkpoint in place, correctly.

Start vLLM with `worker_extension_cls="rollout.vllm_extension.LoadExtension"`. Imports nothing of vLLM until called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class LoadExtension:
    """Methods that `collective_rpc` can call by name."""

    model_runner: Any
    vllm_config: Any

    def can_load(self) -> dict[str, str]:
        """The model that `load_checkpoint` loads again: with HF_HUB_OFFLINE=1 vLLM makes a directory of a hub id.

        Changes nothing: a client asks it when it connects, so that a server without this extension is named then.
        """
        return {"model": str(self.vllm_config.model_config.model)}

    def load_checkpoint(self, path: str) -> dict[str, int]:
        """Load every safetensors file of a directory, or of the hub id that `can_load` says.

        Raises:
            FileNotFoundError: there is none; nothing was touched.
        """
        files = sorted(self._directory(path).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no *.safetensors in {path}")
        self.load_tensors(_tensors(files))
        return {"files": len(files)}

    def _directory(self, path: str) -> Path:
        config = self.vllm_config.model_config
        if Path(path).is_dir() or path != config.model:
            return Path(path)
        from huggingface_hub import snapshot_download

        cache = self.vllm_config.load_config.download_dir
        return Path(snapshot_download(path, revision=config.revision, cache_dir=cache, local_files_only=True))

    def load_tensors(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Load (name, tensor) pairs over the running model.

        On a CPU vLLM 0.30 packs expert weights only when the kernel does not exist yet
        (unquantized_fused_moe_method.py, `_setup_kernel`): without forgetting it, a reload leaves unpacked weights in a
        buffer that is read as packed, silently.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            for module in self.model_runner.get_model().modules():
                if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                    method.moe_kernel = None
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_iterator=iter(tensors))


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, "pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118, the handle is no mapping
                yield name, checkpoint.get_tensor(name)
