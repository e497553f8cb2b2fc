"""A simulated asynchronous accelerator: tensors whose values exist only once their kernels have run.

Shapes are known when a kernel is queued, as on a GPU; values are computed later by the CPU kernel of the same name, so
that a run on the device equals a run on a CPU bit for bit. What would wait for a GPU without saying so is logged with
the line that did it, or raised. The tensors claim torch's "meta" device, which every torch has and no model uses.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.sim.graphs import Graph
from tests.sim.streams import Adversary, Event, Scheduler, Stream, late

DEVICE = torch.device("meta")
POISON_BYTE = 0xEE
# Results whose shape or whose meaning on the host depends on values: a GPU has to be waited for.
SYNCHRONISING = {
    "aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal", "aten::allclose", "aten::nonzero",
    "aten::nonzero_numpy", "aten::argwhere", "aten::masked_select", "aten::bincount", "aten::unique_dim",
    "aten::_unique2", "aten::unique_consecutive",
}  # fmt: skip
HIDE_TRANSFERS = {"aten::to", "aten::type_as", "aten::cpu"}
EMPTY = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}


class ImplicitSyncError(RuntimeError):
    """A call that waits for the device without saying so."""


class Box:
    """The value of a device tensor; None until its kernel has run."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


@dataclass(slots=True)
class Source:
    """An argument of a queued kernel."""

    box: Box
    layout: tuple[Any, ...]


class Memory:
    """One allocation, alive as long as the host program holds a tensor of it. Then the next kernel may get it."""

    def __init__(self, sim: SimDevice, box: Box) -> None:
        self.readers: list[Stream] = []
        weakref.finalize(self, sim.reuse, box, sim.current, self.readers).atexit = False


class SimTensor(torch.Tensor):
    """A tensor on the simulated device."""

    @staticmethod
    def __new__(cls, sim: SimDevice, like: torch.Tensor, memory: Memory | None = None) -> SimTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=DEVICE,
        )
        made.sim, made.box = sim, Box()
        made.memory = memory or Memory(sim, made.box)
        return made

    def __repr__(self) -> str:
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sim = next(x.sim for x in _leaves(args, kwargs) if isinstance(x, SimTensor))
        return sim.dispatch(func, args, kwargs)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self) -> Any:
        raise TypeError("a tensor of the simulated device is not in host memory; copy it first")

    def record_stream(self, stream: Stream) -> None:
        """The memory is also read on `stream`: it is not used again before what is queued there now has run."""
        self.memory.readers.append(stream)


class SimDevice(TorchDispatchMode):
    """The device, and what `AcceleratorStream` needs of `torch.cuda`: `Stream`, `Event`, `stream`, graphs.

    >>> sim = SimDevice(adversary=late)
    >>> stream = AcceleratorStream(DEVICE, sim)

    Args:
        raises: raise at an implicit synchronisation instead of logging it in `syncs`.
    """

    def __init__(self, adversary: Adversary = late, raises: bool = False) -> None:
        super().__init__()
        self.scheduler = Scheduler(adversary)
        self.clock = self.scheduler.clock
        self.syncs: list[str] = []
        self.raises = raises
        self.kernels = 0
        self.current = Stream(self.scheduler)
        self._pinned: dict[int, torch.Tensor] = {}
        self._shapes: dict[Any, Any] = {}

    def Stream(self, device: torch.device | None = None) -> Stream:  # noqa: N802 - torch.cuda's name
        return Stream(self.scheduler)

    def Event(self) -> Event:  # noqa: N802 - torch.cuda's name
        return Event(self.scheduler)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Kernels queue on `stream`; new tensors for this device are made here. Queueing takes no simulated time."""
        before, self.current = self.current, stream
        try:
            with self.clock.paused(), self:
                yield
        finally:
            self.current = before

    def CUDAGraph(self) -> Graph:  # noqa: N802 - torch.cuda's name
        return Graph(lambda: self.current)

    def graph_pool_handle(self) -> None:
        return None

    @contextlib.contextmanager
    def graph(
        self, graph: Graph, pool: None = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """Record kernels instead of queueing them."""
        before, self.current = self.current, graph.recording
        try:
            yield
        finally:
            self.current, graph.recording.open = before, False

    def synchronize(self) -> None:
        """Run everything."""
        for stream in self.scheduler.streams:
            stream.synchronize()

    def implicit_sync(self, what: str) -> None:
        """Log or raise, with the line of the program that waited."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
        where = f"{what} at {Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}"
        if self.raises:
            raise ImplicitSyncError(where)
        self.syncs.append(where)
        self.current.synchronize()

    def reuse(self, box: Box, stream: Stream, readers: list[Stream]) -> None:
        """Memory that nobody holds any more is overwritten by the next kernel that gets it: in its own stream, or once
        the stream that was recorded as its reader has come that far."""
        (readers[-1] if readers else stream).enqueue("reuse", lambda: None if box.value is None else poison(box.value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Queue one call, or run it here when it has nothing to do with this device."""
        name = func._schema.name
        if name == "aten::empty" and kwargs.get("pin_memory"):
            return self._pinned_memory(func, args, kwargs)
        flat = _leaves(args, kwargs)
        if not any(isinstance(x, SimTensor) for x in flat) and kwargs.get("device") != DEVICE:
            return func(*args, **kwargs)
        if name in HIDE_TRANSFERS:
            with self:
                return func.decompose(*args, **kwargs)
        if name == "aten::_to_copy":
            return self._converted(args[0], **kwargs)
        if name == "aten::copy_":
            return self._copied(*args, **kwargs)
        self._check_on_device(name, flat)
        if name in SYNCHRONISING or _selects_by_mask(name, args):
            return self._synchronising(func, args, kwargs)
        return self._kernel(func, args, kwargs)

    def _pinned_memory(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        block = func(*args, **{**kwargs, "pin_memory": False})
        self._pinned[block.untyped_storage().data_ptr()] = block
        return block

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _check_on_device(self, name: str, flat: list[Any]) -> None:
        for x in flat:
            if isinstance(x, torch.Tensor) and not isinstance(x, SimTensor) and x.ndim:
                raise RuntimeError(f"{name} mixes a tensor on the device with one on {x.device}: {tuple(x.shape)}")

    def _converted(self, source: Any, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any):
        """A copy to a device or dtype."""
        dtype = dtype or source.dtype
        if isinstance(source, SimTensor) and (device is None or torch.device(device) == DEVICE):
            return self._kernel(torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
        if isinstance(source, SimTensor):
            return self._copied(torch.empty(source.shape, dtype=dtype), source, non_blocking)
        return self._copied(
            SimTensor(self, torch.empty(source.shape, dtype=dtype, device=DEVICE)), source, non_blocking
        )

    def _copied(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        if not isinstance(target, SimTensor):
            return self._to_host(target, source, non_blocking)
        if isinstance(source, SimTensor) or not source.ndim:
            return self._kernel(torch.ops.aten.copy_.default, (target, source), {})
        return self._from_host(target, source, non_blocking)

    def _to_host(self, target: torch.Tensor, source: SimTensor, non_blocking: bool) -> torch.Tensor:
        poison(target)
        box, like = source.box, _layout(source)
        self.current.enqueue("copy to host", lambda: target.copy_(_value(box, like)), self.clock.copy)
        if not non_blocking:
            self.implicit_sync("blocking copy to the host")
        elif not self._is_pinned(target):
            self.implicit_sync("copy to pageable memory")
        return target

    def _from_host(self, target: SimTensor, source: torch.Tensor, non_blocking: bool) -> SimTensor:
        """Pinned memory is read when the copy runs, pageable memory now."""
        read = source if self._is_pinned(source) and non_blocking else source.clone()
        box, like = target.box, _layout(target)

        def run() -> None:
            if box.value is None:
                box.value = torch.empty_strided(like[0], like[1], dtype=like[3])
            box.value.copy_(read)

        self.current.enqueue("copy to device", run, self.clock.copy)
        if not non_blocking:
            self.implicit_sync("blocking copy to the device")
        return target

    def _synchronising(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.implicit_sync(func._schema.name)
        args, kwargs = _each(lambda x: _value(x.box, _layout(x)) if isinstance(x, SimTensor) else x, args, kwargs)
        out = func(*args, **kwargs)
        return tree_map(lambda x: self._filled(x) if isinstance(x, torch.Tensor) else x, out)

    def _filled(self, value: torch.Tensor) -> SimTensor:
        made = SimTensor(self, value)
        made.box.value = value
        return made

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Shapes now, values when the stream comes to it."""
        inputs = [x for x in _leaves(args, kwargs) if isinstance(x, SimTensor)]
        key = func, *(_signature(x) for x in (*args, *kwargs.items()))
        if key not in self._shapes:
            self._shapes[key] = _infer(func, args, kwargs)
        specs, join = self._shapes[key]
        outs = [self._output(spec, inputs) for spec in specs]
        targets = [(x.box, _layout(x)) for x in outs if isinstance(x, SimTensor)]
        sources = _each(lambda x: Source(x.box, _layout(x)) if isinstance(x, SimTensor) else x, args, kwargs)
        self.kernels += 1
        self.current.enqueue(func._schema.name, functools.partial(_run, func, *sources, targets), self.clock.kernel)
        return join(outs)

    def _output(self, spec: Any, inputs: list[SimTensor]) -> Any:
        if not isinstance(spec, tuple):
            return spec
        like, same, base = spec
        if same is not None:
            return inputs[same]
        if base is None:
            return SimTensor(self, like)
        with torch.inference_mode(inputs[base].is_inference()):  # a view is what its base is
            return SimTensor(self, like, inputs[base].memory)


def poison(tensor: torch.Tensor) -> None:
    """Fill the memory of a host tensor with bytes that nobody computes."""
    tensor.copy_(torch.full((tensor.nbytes,), POISON_BYTE, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape))


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


def _signature(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(_signature(each) for each in x)
    return _layout(x) if isinstance(x, torch.Tensor) else (type(x), x)


def _leaves(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Arguments of an aten call; lists in them are one level deep."""
    out: list[Any] = []
    for x in (*args, *kwargs.values()):
        out.extend(x) if isinstance(x, (list, tuple)) else out.append(x)
    return out


def _each(change: Callable[[Any], Any], args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, each leaf changed."""

    def one(x: Any) -> Any:
        return [change(each) for each in x] if isinstance(x, (list, tuple)) else change(x)

    return [one(x) for x in args], {name: one(x) for name, x in kwargs.items()}


def _selects_by_mask(name: str, args: Any) -> bool:
    """`x[mask]` has as many rows as the mask has ones; `x[mask] = value` is turned into indices first."""
    if name == "aten::where":
        return len(args) == 1
    if name not in ("aten::index", "aten::index_put_", "aten::index_put", "aten::repeat_interleave"):
        return False
    if name == "aten::repeat_interleave":
        return len(args) > 1 and isinstance(args[1], torch.Tensor)
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _infer(func: Any, args: Any, kwargs: Any) -> Any:
    """Layouts of the outputs by the kernel for meta tensors, which computes nothing else."""
    metas: dict[int, torch.Tensor] = {}

    def meta(x: Any) -> Any:
        if isinstance(x, SimTensor):
            size = 1 + x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            base = torch.empty(max(size, 0) if x.numel() else 0, dtype=x.dtype, device="meta")
            metas[len(metas)] = made = base.as_strided(x.shape, x.stride(), x.storage_offset())
            return made
        return x

    meta_args, meta_kwargs = _each(meta, args, kwargs)
    inputs = list(metas.values())
    if func._schema.name == "aten::_grouped_mm":  # its meta kernel knows bfloat16 alone
        out: Any = meta_args[0].new_empty(meta_args[0].shape[0], meta_args[1].shape[-1])
    else:
        out = func(*meta_args, **meta_kwargs)
    storages = [x.untyped_storage()._cdata for x in inputs]

    def spec(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        same = next((i for i, given in enumerate(inputs) if given is x), None)
        storage = x.untyped_storage()._cdata
        return x, same, storages.index(storage) if storage in storages else None

    if isinstance(out, (list, tuple)):
        return [spec(x) for x in out], type(out)
    return [spec(out)], lambda outs: outs[0]


def _value(box: Box, layout: tuple[Any, ...]) -> torch.Tensor:
    """What a kernel reads; memory that nothing has written yet is poison."""
    if box.value is None:
        box.value = torch.empty_strided(layout[0], layout[1], dtype=layout[3])
        poison(box.value)
    return box.value


def _run(func: Any, args: Any, kwargs: Any, targets: list[Any]) -> None:
    args, kwargs = _each(lambda x: _value(x.box, x.layout) if type(x) is Source else x, args, kwargs)
    if kwargs.get("device") == DEVICE:
        kwargs["device"] = torch.device("cpu")
    name = func._schema.name
    if name == "aten::histc" and not args[0].is_floating_point():  # the CPU's counts floating point numbers only
        out = func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    else:
        out = func(*args, **kwargs)
    made = [x for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, torch.Tensor)]
    for (box, layout), value in zip(targets, made, strict=True):
        if name in EMPTY:
            poison(value)
        box.value = value if value.stride() == layout[1] else _restrided(value, layout)


def _restrided(value: torch.Tensor, layout: tuple[Any, ...]) -> torch.Tensor:
    """The CPU kernel laid its result out in another way than was promised."""
    return torch.empty_strided(layout[0], layout[1], dtype=layout[3]).copy_(value)
