"""Where the tokens of each sequence go in a batch, and what fills the routes of padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from storage.trace import RoutingSpec

PADDINGS = ("right", "left", "split", "packed")
PAD_ROUTES = ("native", "strided")


@dataclass(frozen=True)
class Layout:
    """Sequence i is in row `rows[i]`, its tokens side by side from column `starts[i]` on.

    Attributes:
        shape: (rows, columns) of the batch.
        prompt_width: of "split", the column where every completion starts.
        cu_seqlens: of "packed", int32 `[B + 1]`, where each sequence starts and the last one ends, padding included.
    """

    shape: tuple[int, int]
    rows: list[int]
    starts: list[int]
    prompt_width: int | None = None
    cu_seqlens: np.ndarray | None = None


def layout(padding: str, lengths: Sequence[int], prompts: Sequence[int], multiple: int = 1) -> Layout:
    """Place sequences of `lengths` tokens, of which the first `prompts` are prompt.

    >>> layout("split", [5, 3], [2, 1]).starts  # prompts end, and completions start, at column 2
    [0, 1]

    Args:
        padding: one of PADDINGS.
        multiple: the width of the batch, in "packed" of each sequence, is rounded up to a multiple of it.
    """
    if multiple < 1:
        raise ValueError(f"pad_to_multiple_of is {multiple}, need 1 or more")
    if padding == "packed":
        return _packed(lengths, multiple)
    rows = list(range(len(lengths)))
    if padding == "split":
        width = max(prompts)
        columns = width + max(length - prompt for length, prompt in zip(lengths, prompts, strict=True))
        starts = [width - prompt for prompt in prompts]
        return Layout((len(rows), _round_up(columns, multiple)), rows, starts, prompt_width=width)
    columns = _round_up(max(lengths), multiple)
    starts = [columns - length if padding == "left" else 0 for length in lengths]
    return Layout((len(rows), columns), rows, starts)


def strided_routes(spec: RoutingSpec, count: int) -> np.ndarray:
    """Ids `[count, sites, K]` that put equal load on all experts, to within one token.

    Each row has K distinct ids E / K apart, and moves on by one: any window of ids holds as many starts as any other.

    >>> strided_routes(RoutingSpec.uniform(num_sites=1, num_experts=8, top_k=2), 3)[:, 0].tolist()
    [[0, 4], [1, 5], [2, 6]]
    """
    routes = np.zeros((count, *spec.row_shape), spec.dtype)
    for index, site in enumerate(spec.sites):
        first = np.arange(site.top_k) * site.num_experts // site.top_k
        routes[:, index, : site.top_k] = (np.arange(count)[:, None] + first) % site.num_experts
    return routes


def _packed(lengths: Sequence[int], multiple: int) -> Layout:
    ends = np.cumsum([0] + [_round_up(length, multiple) for length in lengths]).astype(np.int32)
    return Layout((1, int(ends[-1])), [0] * len(lengths), ends[:-1].tolist(), cu_seqlens=ends)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
