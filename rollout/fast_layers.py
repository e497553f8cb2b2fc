"""Everything that replaces a model's own way to compute its experts, linear layers and norms; it can be taken away."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from rollout.experts import use_experts_implementation
from rollout.linears import use_fast_linears
from rollout.native import NativeKernels
from rollout.native_layers import use_native_norms
from rollout.packed_experts import is_experts, packed_bytes, packing_budget


class FastLayers:
    """Of one model. Packed copies of weights are kept for the next use.

    Attributes:
        native: the kernels in use, or None.
    """

    def __init__(self, model: Any, experts: str | None, pack: bool, native: NativeKernels | None) -> None:
        """`experts` names the experts implementation, None that the experts of a group stay as they are; `pack` as in
        EngineOptions."""
        self.native = native
        self._model, self._experts, self._pack = model, experts, pack
        self._undo = contextlib.ExitStack()

    def use(self) -> None:
        """Replace them; on the engine's stream, as all of these."""
        budget = packing_budget(self._model) if self._pack else 0
        if self._experts is not None:
            use_experts_implementation(self._model, self._experts, self._pack, self.native, self._undo)
        if self._experts == "hit_experts":
            budget -= packed_bytes(filter(is_experts, self._model.modules()))
            use_fast_linears(self._model, self.native, max(budget, 0), self._undo)
        if self.native is not None:
            use_native_norms(self._model, self.native, self._undo)

    def undo(self) -> None:
        """Let the model compute as transformers does."""
        self._undo.close()
        if self._experts is not None:
            self._model.set_experts_implementation("eager")

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Let it, for a while."""
        self.undo()
        try:
            yield
        finally:
            self.use()

    def use_kernels(self, native: NativeKernels | None) -> None:
        """Our own, or only torch's."""
        self.undo()
        self.native = native
        self.use()
