"""Which recorded rows a router takes: those of a fixed batch, or those of the model's forward that it is part of.

Under gradient checkpointing a decoder layer runs a second time in the backward, perhaps after further forwards have
begun (pipelines). It then gets the very tensor that it got the first time, so that tensor's address tells which forward
it repeats.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from storage.sites import FoundRouter

_LAYER = re.compile(r"^.*?\.\d+(?=\.)")


class Rows(NamedTuple):
    """Rows of one forward, on one device.

    Attributes:
        ids: `[rows, sites, K]`, narrow.
        forced: bool `[rows]`, which are forced; None when all are.
        counted: bool `[rows]`, forced rows that were recorded, without padding; None when all are.
        tokens: bool `[rows]`, rows that are tokens; None when all are.
    """

    ids: torch.Tensor
    forced: torch.Tensor | None = None
    counted: torch.Tensor | None = None
    tokens: torch.Tensor | None = None

    def to(self, device: torch.device) -> Rows:
        """The same on `device`."""
        return Rows(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]


class RowSource(Protocol):
    """What a router under replay asks."""

    def rows(self, site: int, device: torch.device) -> Rows:
        """The rows of the forward that is running, for the router of a site."""

    def open(self) -> contextlib.AbstractContextManager[None]:
        """While the replay context is open."""


class FixedRows:
    """The same rows for every forward."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def rows(self, site: int, device: torch.device) -> Rows:
        """Moved to a device once."""
        if self._rows.ids.device != device:
            self._rows = self._rows.to(device)
        return self._rows

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Nothing to prepare."""
        yield


class RowsOfForward:
    """Each forward of the model has rows of its own.

    Args:
        find: the rows of a forward, from its arguments.
        check: called when the context is left without an error.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        routers: Sequence[FoundRouter],
        find: Callable[[Any, Any], Rows],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._layer_of_site = [_layer_of(router.site.name) for router in routers]
        self._find = find
        self._check = check
        self._running: Rows | None = None
        self._forwards = 0
        self._latest: Rows | None = None
        self._begun: dict[tuple[str, int], tuple[Rows, StorageWeakRef]] = {}
        self._entered: dict[str, tuple[Rows, set[int]]] = {}

    def rows(self, site: int, device: torch.device) -> Rows:
        """Of the layer that runs now; each of its routers takes them once per run."""
        layer = self._layer_of_site[site]
        rows, taken = self._entered.get(layer, (self._latest, set()))
        if self._forwards == 1:
            rows = self._latest
        elif site in taken or layer not in self._entered:
            raise RuntimeError(
                f"layer {layer} runs again, but its input is of none of {self._forwards} forwards under this replay; "
                "with several in flight checkpointed inputs must stay where they are, so replay one at a time"
            )
        if rows is None:
            raise RuntimeError("a router ran outside of a forward of the model that RouterReplay was made of")
        if rows.ids.device != device:
            raise RuntimeError(f"a router is on {device}, the model's input on {rows.ids.device}: replay one device")
        taken.add(site)
        return rows

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Follow the model's forwards and its layers'."""
        with contextlib.ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            yield
            self._check()

    def _hooks(self) -> Iterator[Any]:
        """Layers, and what is right below: transformers 5.24 checkpoints a layer's forward, inside its own hooks."""
        yield self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        yield self._model.register_forward_hook(self._end, always_call=True)
        for name in sorted(set(self._layer_of_site)):
            layer = self._model.get_submodule(name)
            for module in (layer, *layer.children()):
                enter = functools.partial(self._enter, name, module is layer)
                yield module.register_forward_pre_hook(enter, with_kwargs=True)

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        self._running = self._latest = self._find(args, kwargs)
        self._forwards += 1

    def _end(self, module: Any, args: Any, output: Any) -> None:
        self._running = None

    def _enter(self, layer: str, is_layer: bool, module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, torch.Tensor):
            return
        key = layer, hidden.data_ptr()
        if self._running is not None:
            if is_layer:
                self._begun[key] = self._running, StorageWeakRef(hidden.untyped_storage())
                self._entered[layer] = self._running, set()
        elif key in self._begun:
            rows, storage = self._begun[key]
            if not storage.expired():  # else the memory was freed, and something else lies there now
                self._entered[layer] = rows, set()


def in_order(batches: Sequence[Rows]) -> tuple[Callable[[Any, Any], Rows], Callable[[], None]]:
    """For RowsOfForward: the n-th forward takes the n-th batch, and all are taken."""
    taken = 0

    def find(args: Any, kwargs: Any) -> Rows:
        nonlocal taken
        if taken == len(batches):
            raise RuntimeError(
                f"forward {taken + 1} under a replay of {len(batches)} micro-batches; each is taken once"
            )
        taken += 1
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        return batches[taken - 1].to(tensors[0].device)

    def check() -> None:
        if taken != len(batches):
            raise RuntimeError(f"{taken} of {len(batches)} micro-batches were forwarded under this replay")

    return find, check


class OncePerForward:
    """Each router runs once in a forward of the model; in the backward, under checkpointing, again."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._calls = [0] * len(names)
        self._running = False
        self._followed = False
        self._with_gradients = False

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """While the replay context is open."""
        handles = [model.register_forward_pre_hook(self._begin), model.register_forward_hook(self._end)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def first_time(self, site: int) -> bool:
        """Whether this is no repetition of a forward that was followed."""
        self._calls[site] += 1
        return self._running or not self._followed

    def cut(self) -> bool:
        """Whether the graph is cut here: reentrant checkpointing runs a layer first without gradients."""
        return self._with_gradients and not torch.is_grad_enabled()

    def _begin(self, module: Any, args: Any) -> None:
        self._running = self._followed = True
        self._with_gradients = torch.is_grad_enabled()
        self._calls = [0] * len(self._names)

    def _end(self, module: Any, args: Any, output: Any) -> None:
        self._running = False
        for name, calls in zip(self._names, self._calls, strict=True):
            if calls != 1:
                raise RuntimeError(f"router {name} ran {calls} times in one forward; each recorded row is for one run")


def _layer_of(name: str) -> str:
    """`model.layers.3.mlp.gate` is in `model.layers.3`, the module that is checkpointed."""
    match = _LAYER.match(name)
    assert match is not None, name
    return match[0]
