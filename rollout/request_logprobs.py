"""Where one request's optional logprobs gather on the host until its trace is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollout.sampling import SamplingParams


class RequestLogprobs:
    """What one request asked for, filled by position as steps end."""

    def __init__(self, params: SamplingParams, prompt_len: int) -> None:
        self.top_n = params.logprobs or 0
        self.prompt_top_n = params.prompt_logprobs or 0
        self.wants_prompt = params.prompt_logprobs is not None
        self._completion: dict[int, tuple[np.ndarray, ...]] = {}
        rows = prompt_len - 1 if self.wants_prompt else 0
        shapes = ((rows,), (rows,), *[(rows, self.prompt_top_n)] * 3)
        kinds = np.float32, np.float32, np.int32, np.float32, np.float32
        self._known = np.zeros(rows, bool)
        self._prompt = [np.zeros(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]

    @classmethod
    def wanted_by(cls, params: SamplingParams, prompt_len: int) -> RequestLogprobs | None:
        """None when nothing optional is asked for."""
        return cls(params, prompt_len) if params.logprobs or params.prompt_logprobs is not None else None

    def set_completion(self, position: int, values: tuple[np.ndarray, ...]) -> None:
        """ids, logprobs and raw_logprobs `[n]` at completion token `position`."""
        self._completion[position] = values

    def set_prompt(self, position: int, values: Sequence[np.ndarray]) -> None:
        """logprobs and raw_logprobs `[R]`, then a `Top`, of the prompt tokens from `position + 1` on."""
        end = position + len(values[0])
        for whole, part in zip(self._prompt, values, strict=False):
            whole[position:end] = part
        self._known[position:end] = True

    def trace_fields(self, completion_len: int) -> dict[str, Any]:
        """The fields of a Trace with this many completion tokens; a prompt that was not computed whole has none."""
        fields: dict[str, Any] = {}
        if self.top_n and completion_len:
            columns = zip(*(self._completion[at] for at in range(completion_len)), strict=True)
            names = "top_ids", "top_logprobs", "raw_top_logprobs"
            fields |= {name: np.stack(rows) for name, rows in zip(names, columns, strict=True)}
        if self.wants_prompt and self._known.all():
            fields |= dict(zip(("prompt_logprobs", "raw_prompt_logprobs"), self._prompt, strict=False))
            if self.prompt_top_n and len(self._known):
                names = "prompt_top_ids", "prompt_top_logprobs", "raw_prompt_top_logprobs"
                fields |= dict(zip(names, self._prompt[2:], strict=True))
        for values in fields.values():
            values.flags.writeable = False
        return fields
