"""A double of the selecting top-k: from one step on, routers choose their least likely experts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.rollout.probes import parts_of


class _Flipped(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **(kwargs or {}))
        return func(*args, **{**(kwargs or {}), "largest": False})


class Flip:
    """`from_step` is the number of the first step with the other selection; None is never."""

    def __init__(self, from_step: int | None) -> None:
        self.from_step = from_step
        self._steps = 0
        self._mode: _Flipped | None = None

    def count_steps(self, begin: Callable[[], None]) -> Callable[[], None]:
        def begun() -> None:
            self._steps += 1
            begin()

        return begun

    def enter(self, *_: Any) -> None:
        if self.from_step is not None and self._steps > self.from_step:
            self._mode = _Flipped()
            self._mode.__enter__()

    def leave(self, *_: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None


@contextlib.contextmanager
def flipped_selection(client: Any, from_step: int | None) -> Iterator[Flip]:
    """Around whole forwards, so that an answer forced inside them stands."""
    flip, model = Flip(from_step), parts_of(client)[2]
    capturer = client.backend._built.runner.capturer
    begin, capturer.on_forward_begin = capturer.on_forward_begin, flip.count_steps(capturer.on_forward_begin)
    handles = [model.register_forward_pre_hook(flip.enter), model.register_forward_hook(flip.leave)]
    try:
        yield flip
    finally:
        capturer.on_forward_begin = begin
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def flipped_at_first_preemption(client: Any) -> Iterator[Flip]:
    """The selection changes with the step in which a request is missing for the first time."""
    engine, scheduler, _ = parts_of(client)
    preempt = scheduler.preempt
    with flipped_selection(client, None) as flip:

        def note(request: Any) -> None:
            if flip.from_step is None:
                flip.from_step = engine.stats.forwards
            preempt(request)

        scheduler.preempt = note
        try:
            yield flip
        finally:
            scheduler.preempt = preempt
