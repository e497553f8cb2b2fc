"""`sglang.Engine` as far as it is used, with the calls of SGLang 0.5.23, and without a model or a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from safetensors import safe_open

from tests.engines.fakes import Drawn, cool, sglang_body

SHAPE = (2, 2, 8, 96)


class TokenizerManager:
    """The coroutines of SGLang's that an update and an abort use; all on the loop of the requests."""

    context_len = 200
    last_receive_tstamp = 0.0  # seconds; SGLang sets it with each message of its schedulers

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        assert rid
        assert not abort_all
        self._engine.aborted.add(rid)

    async def update_weights_from_disk(self, obj: Any, request: Any) -> tuple[bool, str, int]:
        assert asyncio.get_running_loop() is self._engine.loop
        if self._engine.refuse:
            return False, "shape mismatch", 0
        assert obj.flush_cache
        (file,) = Path(obj.model_path).glob("*.safetensors")
        with safe_open(file, "numpy") as tensors:
            self._engine.weights = str(float(tensors.get_tensor("model.norm.weight")[0]))
        self._engine.version = obj.weight_version
        return True, "Succeeded to update model weights.", 0


class Engine:
    """`sglang.Engine`. `made` are those that were started, with the arguments of each."""

    made: ClassVar[list[Engine]] = []

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs, self.weights, self.version, self.loop = kwargs, "1.0", "default", None
        self.refuse = self.dead = self.down = self.hold = False
        self.aborted: set[str] = set()
        self.tokenizer_manager = TokenizerManager(self)
        self.made.append(self)

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        return_logprob: Any = False,
        logprob_start_len: Any = None,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        rid: Any = None,
    ) -> Any:
        self.loop = self.loop or asyncio.get_running_loop()
        assert return_logprob
        assert return_routed_experts
        assert not stream
        await asyncio.sleep(0)
        if self.dead:
            raise RuntimeError("the scheduler died")
        count, finish = sampling_params["max_new_tokens"], "length"
        while self.hold and rid not in self.aborted:
            await asyncio.sleep(0.005)
        if rid in self.aborted:
            count, finish = 3, "abort"
        drawn = Drawn(input_ids, count, sampling_params["sampling_seed"], self.weights, SHAPE)
        cool(drawn, sampling_params["temperature"])
        return sglang_body(drawn, finish, rid, self.version)

    def shutdown(self) -> None:
        self.down = True


PACKAGE = {
    "sglang/__init__.py": "from tests.engines.fake_sglang import Engine\n__version__ = '0.5.23'\n",
    "sglang/srt/__init__.py": "",
    "sglang/srt/managers/__init__.py": "",
    "sglang/srt/managers/io_struct.py": "from types import SimpleNamespace as UpdateWeightFromDiskReqInput\n",
}
"""Files that make it importable as `sglang`, in processes of their own too."""


def install(folder: Path) -> None:
    """Write them below `folder`, which goes on the path."""
    for name, text in PACKAGE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
