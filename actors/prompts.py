"""Reads the pipeline's prompts: JSONL or Parquet, text or token ids, each with a stable key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from actors.config import ConfigError

COLUMNS = ("prompt", "prompt_ids", "key")


class Prompt(NamedTuple):
    """Text or token ids, and the name that its sample ids carry.

    >>> Prompt("12+34=", "7")
    """

    prompt: str | list[int]
    key: str


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read `.jsonl` or `.parquet`. A prompt without `key` is named by its index in the file.

    Raises:
        ConfigError: naming the row, when it has not exactly one of `prompt` and `prompt_ids`, or a key twice.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"prompts file {path} does not exist")
    read = {".jsonl": _jsonl_rows, ".parquet": _parquet_rows}.get(path.suffix)
    if read is None:
        raise ConfigError(f"prompts file {path} must end in .jsonl or .parquet")
    prompts = [_prompt(row, index, where) for index, (where, row) in enumerate(read(path))]
    if not prompts:
        raise ConfigError(f"prompts file {path} has no prompts")
    _check_keys_differ(prompts, path)
    return prompts


def prompts_of_step(prompts: list[Prompt], step: int, count: int) -> list[Prompt]:
    """The `count` prompts of a step, in file order, from the start again after the end.

    >>> [p.key for p in prompts_of_step([Prompt("a", "0"), Prompt("b", "1"), Prompt("c", "2")], step=1, count=2)]
    ['2', '0']

    Raises:
        ConfigError: when a step would hold a prompt twice.
    """
    if count > len(prompts):
        raise ConfigError(
            f"prompts_per_step is {count}, but the prompts file has {len(prompts)}; use num_samples for more"
        )
    return [prompts[(step * count + i) % len(prompts)] for i in range(count)]


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{where} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ConfigError(f'{where} is {line.strip()[:40]!r}, need an object such as {{"prompt": "12+34="}}')
            yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    names = pq.read_schema(path).names
    table = pq.read_table(path, columns=[name for name in COLUMNS if name in names])
    for number, row in enumerate(table.to_pylist()):
        yield f"{path} row {number}", {name: value for name, value in row.items() if value is not None}


def _prompt(row: dict[str, Any], index: int, where: str) -> Prompt:
    key = str(row.get("key", index))
    if not key or "/" in key:
        raise ConfigError(f"{where}: key is {key!r}; it must not be empty or contain '/', which separates a sample_id")
    return Prompt(_text_or_ids(row, where), key)


def _text_or_ids(row: dict[str, Any], where: str) -> str | list[int]:
    text, ids = row.get("prompt"), row.get("prompt_ids")
    if (text is None) == (ids is None):
        raise ConfigError(f"{where} needs exactly one of 'prompt' and 'prompt_ids', it has {sorted(row)}")
    if isinstance(text, str):
        return text
    if text is not None:
        raise ConfigError(f"{where}: prompt is {text!r}, need text; token ids go into 'prompt_ids'")
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    raise ConfigError(f"{where}: prompt_ids is {ids!r}, need a list of integers")


def _check_keys_differ(prompts: list[Prompt], path: Path) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.key in seen:
            raise ConfigError(f"prompts file {path} has the key {prompt.key!r} twice; a key names one prompt")
        seen.add(prompt.key)
