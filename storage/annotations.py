"""Facts that arrive after the commit: rewards, labels, anything. Committed files are never rewritten.

    traces/_annotations/step-000000007/000000000.json
    {"format_version": "1", "step": 7, "sha256": "<of samples>", "samples": "{\\"run/7/0-0/0\\": {\\"reward\\": 1.0}}"}

One file per call, created exclusively under the next free number; it is its own manifest. Readers join the files of a
step in the order of their numbers: per sample and key, the higher number wins.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

import pyarrow as pa

from storage.errors import DamagedDataError
from storage.manifest import UNREADABLE, step_folder, step_of_folder
from storage.schema import FORMAT_VERSION, check_version
from storage.store import Store

Facts = Mapping[str, Any]
_FOLDER = "_annotations"
_FILE = re.compile(r"\d{9}\.json")


class Annotations:
    """The annotations of a dataset as they were at the last `refresh`; each step's are read when needed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.refresh()

    def refresh(self) -> None:
        """See what was annotated since."""
        self.steps = {step for name in self._store.names(_FOLDER) if (step := step_of_folder(name)) is not None}
        self._facts: dict[int, dict[str, Facts]] = {}

    def of(self, steps: Iterable[int]) -> dict[str, Facts]:
        """The facts of each annotated sample of these steps."""
        found: dict[str, Facts] = {}
        for step in self.steps.intersection(steps):
            if step not in self._facts:
                self._facts[step] = self._read(step)
            found |= self._facts[step]
        return found

    def _read(self, step: int) -> dict[str, Facts]:
        facts: dict[str, Facts] = {}
        for name in annotation_files(self._store, step):
            for sample_id, added in read_annotation(self._store, name, step).items():
                facts[sample_id] = {**facts.get(sample_id, {}), **added}
        return facts


def annotation_files(store: Store, step: int) -> list[str]:
    """The annotation files of a step, in the order in which they apply."""
    folder = f"{_FOLDER}/{step_folder(step)}"
    return [f"{folder}/{name}" for name in store.names(folder) if _FILE.fullmatch(name)]


def read_annotation(store: Store, name: str, step: int) -> dict[str, Facts]:
    """One file; DamagedDataError, naming it, when it cannot be read."""
    try:
        raw = json.loads(store.read(name))
        check_version(raw["format_version"], "the annotation")
        if sha256(raw["samples"].encode()).hexdigest() != raw["sha256"]:
            raise ValueError("its sha256 is not that of its samples")
        if raw["step"] != step:
            raise ValueError(f"it annotates step {raw['step']}")
        samples = json.loads(raw["samples"])
        for sample_id, facts in samples.items():
            check_facts(sample_id, facts)
        return samples
    except UNREADABLE as error:
        raise DamagedDataError(f"{store.url(name)}: {type(error).__name__}: {error}") from error


def write_annotation(store: Store, step: int, samples: Mapping[str, Facts]) -> str:
    """Add a file under the next free number; returns its name. Racing writers get different numbers."""
    for sample_id, facts in samples.items():
        check_facts(sample_id, facts)
    text = json.dumps(dict(samples), allow_nan=False)
    head = {"format_version": FORMAT_VERSION, "step": step, "sha256": sha256(text.encode()).hexdigest()}
    data = json.dumps(head | {"samples": text}).encode()
    while True:
        files = annotation_files(store, step)
        number = int(files[-1][-14:-5]) + 1 if files else 0
        name = f"{_FOLDER}/{step_folder(step)}/{number:09d}.json"
        try:
            store.create(name, data)
            return name
        except FileExistsError:
            continue  # another annotator took the number


def drop_annotations(store: Store, below: int) -> None:
    """Remove the annotations of steps below `below`."""
    for name in store.names(_FOLDER):
        if (step := step_of_folder(name)) is not None and step < below:
            store.remove(f"{_FOLDER}/{name}")


def check_facts(sample_id: str, facts: Any) -> None:
    """ValueError unless `facts` is a dict of text keys with a finite number, or None, as `reward`."""
    if not isinstance(facts, Mapping) or not all(isinstance(key, str) for key in facts):
        raise ValueError(f"annotation of {sample_id!r} is {facts!r}, need a dict such as {{'reward': 1.0}}")
    reward = facts.get("reward")
    if reward is not None and (type(reward) not in (int, float) or not math.isfinite(reward)):
        raise ValueError(f"annotation of {sample_id!r}: reward is {reward!r}, need a finite number or None")


def join(table: pa.Table, facts: Mapping[str, Facts]) -> pa.Table:
    """`table` with `reward` replaced and every other fact added to `metadata`, where it has those columns."""
    added = [facts.get(sample_id, {}) for sample_id in table.column("sample_id").to_pylist()]
    if "reward" in table.column_names:
        rewards = table.column("reward").to_pylist()
        rewards = [new.get("reward", old) for new, old in zip(added, rewards, strict=True)]
        table = _replace(table, "reward", pa.array(rewards, pa.float64()))
    if "metadata" in table.column_names:
        texts = zip(table.column("metadata").to_pylist(), added, strict=True)
        table = _replace(table, "metadata", pa.array([_merged(text, new) for text, new in texts], pa.string()))
    return table


def _merged(text: str, facts: Facts) -> str:
    free = {key: value for key, value in facts.items() if key != "reward"}
    return json.dumps({**json.loads(text), **free}) if free else text


def _replace(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    index = table.column_names.index(name)
    return table.set_column(index, table.field(index), values)
