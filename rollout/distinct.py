"""A row of routes names each expert once. One that does not was filled, not recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from storage.trace import RoutingSpec


def check_distinct(
    spec: RoutingSpec, ids: np.ndarray, mask: np.ndarray | None, where: Callable[[int], str] = "row {}".format
) -> None:
    """A missing row that was filled with zeros would send all of a token to expert 0: refuse it here.

    Args:
        ids: `[rows, sites, K]`.
        mask: bool `[rows]`, the rows to look at; None for all.
        where: names a row in the error.

    Raises:
        ValueError: naming the row and the site.
    """
    for index, site in enumerate(spec.sites):
        ranked = np.sort(ids[:, index, : site.top_k], axis=-1)
        twice = (ranked[:, 1:] == ranked[:, :-1]).any(-1)
        if mask is not None:
            twice &= mask
        if twice.any():
            row = int(twice.argmax())
            raise ValueError(
                f"{where(row)} at site {index} ({site.name}) names an expert twice: {ids[row, index].tolist()}; "
                "a row that was not recorded must be masked, not filled"
            )
