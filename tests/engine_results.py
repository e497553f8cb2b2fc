"""Results of two engines that compute the same with other kernels."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-4) -> None:
    """The same tokens, ends and routes; logprobs up to rounding."""
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            if "logprobs" in name:
                np.testing.assert_allclose(mine[name], value, atol=tolerance, rtol=tolerance, err_msg=name)
            else:
                assert mine[name] == value, name
