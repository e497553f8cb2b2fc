"""Counter-based random numbers: one uniform per (seed, step, prompt_key, j, position), whatever else runs.

A retry or a resume therefore continues the same stream, and no generator state has to be kept or restored.
"""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_key(seed: int, sample_id: str) -> int:
    """64-bit key of one sample's stream. The run's name does not enter: `run/step/prompt_key/j` without `run`.

    >>> stream_key(0, "a/0/0-0/1") == stream_key(0, "b/0/0-0/1") != stream_key(0, "a/0/0-0/2")
    True
    """
    counter = sample_id.partition("/")[2] or sample_id
    digest = hashlib.blake2b(f"{seed}/{counter}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float32 in [0, 1) for uint64 keys and positions of equal shape.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014) over `key + (position + 1) * golden ratio`; 24 bits are kept.
    """
    with np.errstate(over="ignore"):
        x = keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
