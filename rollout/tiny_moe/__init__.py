"""A small trained Qwen3-MoE that adds numbers, and the problems it was trained on. Imports no torch.

The model reads one character per token: `47+8=` is answered by `55` and `<eos>`. It answers about half of the
sums it never saw correctly, so reinforcement learning has room. `examples/train_tiny_moe.py` retrains it.

>>> tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
>>> model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype="bfloat16")
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

MODEL_PATH = Path(__file__).parent
MAX_ANSWER_TOKENS = 5
"""Enough for the longest answer, `1998` and `<eos>`."""

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
HELD_OUT_ONE_IN = 10


class Problem(NamedTuple):
    """A sum to complete.

    >>> Problem(prompt="47+8=", answer="55")
    """

    prompt: str
    answer: str


def problems(n: int, seed: int, digits: int = 3, split: Split = "train") -> list[Problem]:
    """Draw `n` sums; the same arguments give the same list, and a shorter list is the start of a longer one.

    An operand is drawn below 10, 100, ... or 10**`digits`, each bound equally likely, so short sums repeat.
    About one pair of operands in ten is held out for `split="test"`, together with its mirror image: `a+b`
    is held out exactly when `b+a` is. The shipped model saw only the train split, with up to 3 digits.

    >>> problems(2, seed=1, split="test")
    [Problem(prompt='6+85=', answer='91'), Problem(prompt='664+6=', answer='670')]

    Raises:
        ValueError: for a negative `n`, `digits` below 1 or an unknown split.
    """
    if n < 0:
        raise ValueError(f"n is {n}: ask for 0 or more problems")
    if digits < 1:
        raise ValueError(f"digits is {digits}: operands need at least 1 digit")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is unknown: choose one of {SPLITS}")
    pairs = _pairs(random.Random(seed), digits)
    wanted = (pair for pair in pairs if _is_held_out(*pair) == (split == "test"))
    return [Problem(f"{a}+{b}=", str(a + b)) for a, b in islice(wanted, n)]


def exact_match(text: str | None, answer: str) -> float:
    """1.0 when `text` is the answer, character for character, else 0.0; no text (an aborted request) is 0.0.

    `text` is the completion without special tokens: `tokenizer.decode(ids, skip_special_tokens=True)`.

    >>> exact_match("55", "55"), exact_match("055", "55"), exact_match(None, "55")
    (1.0, 0.0, 0.0)
    """
    return float(text == answer)


def _pairs(rng: random.Random, digits: int) -> Iterator[tuple[int, int]]:
    while True:
        yield _operand(rng, digits), _operand(rng, digits)


def _operand(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** rng.randint(1, digits))


def _is_held_out(a: int, b: int) -> bool:
    """Decided by the pair alone, so no seed can move a problem from one split to the other."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % HELD_OUT_ONE_IN == 0
