"""Which layers of a model compute with our own kernels: experts modules and RMS norms whose arithmetic is known.

What a layer computes is not told by its name: it is tried on random rows, and keeps its own forward where they differ.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rollout.native import LANES, NativeKernels, fit_vectors, fits
from rollout.packed_experts import is_experts, projections
from rollout.router import wrap_forward

logger = logging.getLogger(__name__)
# Rows of an expert up to which our own kernels were faster on an AMD EPYC (AVX-512), by dtype and whether there are
# packed weights.
NATIVE_ROWS = {
    (torch.float32, False): 32,
    (torch.float32, True): 1,
    (torch.bfloat16, False): 12,
    (torch.bfloat16, True): 12,
}
TRIED_ROWS = 5
MOST_DIFFERING = 0.02


class Native(NamedTuple):
    """Our own kernels, for groups of at most so many rows."""

    kernels: NativeKernels
    most_rows: int


def use_native_products(model: Any, native: NativeKernels | None) -> None:
    """Let the experts modules of `model` compute groups of few rows with our own kernels; see `forget_native`."""
    if native is None:
        return
    for module in model.modules():
        if is_experts(module) and not module.is_transposed:
            packed = getattr(module, "packed_weights", {})
            weights = projections(module).items()
            most_rows = {name: NATIVE_ROWS.get((w.dtype, name in packed), 0) for name, w in weights}
            use_native_experts(module, native, most_rows)


def use_native_experts(experts: Any, native: NativeKernels, most_rows: dict[str, int]) -> None:
    """Compute the named projections of groups of at most so many rows with our own kernels, and all of the module at
    once where that is possible."""
    weights = {name: weight for name, weight in projections(experts).items() if fits(weight)}
    experts.native_products = {name: Native(native, most_rows[name]) for name in weights}
    experts.native_module = None
    if len(weights) == len(most_rows) and gates_with_silu(experts):
        experts.native_module = Native(native, min(most_rows.values()))


def forget_native(model: Any) -> None:
    """Let the experts modules of `model` compute with torch's products."""
    for module in model.modules():
        if is_experts(module):
            module.native_products, module.native_module = {}, None


@torch.inference_mode()
def gates_with_silu(experts: Any) -> bool:
    """Whether a module's experts are `down(silu(gate(x)) * up(x))` and nothing else: tried on random rows, of values up
    to 1,000 and more, since some families clamp them."""
    if not experts.has_gate or experts.has_bias or experts.has_post_expert_norm:
        return False
    gate_up, down = experts.gate_up_proj, experts.down_proj
    count, hidden, inner = down.shape
    if gate_up.dtype is not down.dtype or gate_up.shape != (count, 2 * inner, hidden) or hidden % LANES:
        return False
    rows = _random(TRIED_ROWS, 2 * inner, gate_up.dtype, powers=range(-1, TRIED_ROWS - 1))
    gate, up = rows.chunk(2, dim=-1)
    return torch.equal(experts._apply_gate(rows), F.silu(gate) * up)


def native_output(experts: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
    """`[tokens, hidden]`, in one call; None where the module or the rows are not for it."""
    native: Native | None = getattr(experts, "native_module", None)
    if native is None or ids.shape != weights.shape or hidden.dtype is not experts.down_proj.dtype:
        return None
    return native.kernels.gated_experts(hidden, ids, weights, experts.gate_up_proj, experts.down_proj, native.most_rows)


def use_native_norms(model: Any, native: NativeKernels, undo: contextlib.ExitStack) -> None:
    """Let the RMS norms of `model` compute with our own kernels: those whose only parameter is a weight that multiplies
    `x / sqrt(mean(x * x) + eps)`, rounded to its dtype. `undo` gets what gives them their forwards back."""
    for module in model.modules():
        eps = _eps_of_norm(module)
        if eps is not None and _is_norm(module, eps, native):
            undo.callback(wrap_forward(module, functools.partial(_norm, module, eps, native)))


def _norm(
    module: Any, eps: float, native: NativeKernels, forward: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        weight = module.weight
        if len(args) == 1 and not kwargs and _is_rows(args[0], weight):
            return native.rms_norm(args[0], weight, eps)
        return forward(*args, **kwargs)

    return norm


def _is_rows(given: torch.Tensor, weight: torch.Tensor) -> bool:
    return given.dtype is weight.dtype and given.shape[-1:] == weight.shape and given.is_contiguous()


def _eps_of_norm(module: Any) -> float | None:
    """Of a module that may be such a norm."""
    parameters = dict(module.named_parameters())
    is_free = "forward" not in vars(module)
    if not is_free or "norm" not in type(module).__name__.lower() or list(parameters) != ["weight"]:
        return None
    eps, weight = getattr(module, "variance_epsilon", getattr(module, "eps", None)), parameters["weight"]
    takes_rows_only = len(inspect.signature(module.forward).parameters) == 1
    return eps if takes_rows_only and isinstance(eps, float) and weight.ndim == 1 and fit_vectors(weight) else None


@torch.inference_mode()
def _is_norm(module: Any, eps: float, native: NativeKernels) -> bool:
    """Tried on random rows, small ones too, which show what eps is, with a random weight, since ones hide its use."""
    weight = module.weight
    rows = _random(TRIED_ROWS, len(weight), weight.dtype, powers=range(0, -TRIED_ROWS, -1))
    before = weight.clone()
    try:
        weight.copy_(_random(1, len(weight), weight.dtype)[0])
        expected, found = module(rows), native.rms_norm(rows, weight, eps)
    except Exception as error:  # whatever a module raises that takes other rows
        logger.debug("%s is no plain RMS norm: %s", type(module).__name__, error)
        return False
    finally:
        weight.copy_(before)
    return expected.dtype is found.dtype and expected.shape == found.shape and _differ_little(expected, found)


def _differ_little(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """In float32 by rounding; in bfloat16 hardly any value differs, else something is rounded at another place."""
    if expected.dtype is torch.float32:
        return torch.allclose(expected, found, rtol=1e-5, atol=1e-6)
    return bool((expected != found).float().mean() < MOST_DIFFERING)


def _random(rows: int, width: int, dtype: torch.dtype, powers: Sequence[int] = (0,)) -> torch.Tensor:
    """Rows of growing or shrinking values: times 10 to these powers."""
    random = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return (random * 10.0 ** torch.tensor(powers)[:, None]).to(dtype)
