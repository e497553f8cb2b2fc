"""Which model families this engine serves, and how: a table measured with tiny models, and what it cannot know.

The table is data (families.json), written by the tests' builder for one version of transformers. With another version
it is shown beside the families that were never measured; the self-test at load decides about every checkpoint anyway.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

TABLE_FILE = Path(__file__).with_name("families.json")
NOT_MEASURED = "not measured: tried, and tested, when it is loaded"


class FamilyRow(NamedTuple):
    """One model type.

    Attributes:
        served: "fast: slot pool", "fast: latent", "fast: states", "slow: own cache", or "refused: " and why.
        captured: its routes are recorded.
        replayed: `RouterReplay` can force them.
    """

    family: str
    served: str
    captured: bool
    replayed: bool


class FamilyTable(NamedTuple):
    """Rows in alphabetical order, and the version of transformers that they were measured with."""

    transformers: str
    rows: tuple[FamilyRow, ...]


def measured_table() -> FamilyTable:
    """The table of families.json.

    >>> measured_table().rows[0]
    FamilyRow(family='afmoe', served='fast: slot pool', captured=True, replayed=True)
    """
    data = json.loads(TABLE_FILE.read_text(encoding="utf-8"))
    return FamilyTable(data["transformers"], tuple(FamilyRow(**row) for row in data["families"]))


def declared_families() -> list[str]:
    """Model types of the installed transformers whose causal language model declares router logits. Takes seconds."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def declares(name: str) -> bool:
        module = sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]].__module__]
        outputs = (getattr(thing, "_can_record_outputs", None) for thing in vars(module).values())
        return any(isinstance(declared, dict) and "router_logits" in declared for declared in outputs)

    return sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if declares(name))


def family_table() -> Table:
    """What `moe-rollout families` prints, for the installed transformers."""
    measured, installed = measured_table(), importlib.metadata.version("transformers")
    rows = list(measured.rows)
    title = f"{len(rows)} MoE families, measured with transformers {measured.transformers}"
    if installed != measured.transformers:
        known = declared_families()
        new = [name for name in known if name not in {row.family for row in rows}]
        rows = [row for row in rows if row.family in known]
        rows += [FamilyRow(name, NOT_MEASURED, False, False) for name in new]
        title += f"; installed is {installed}"
    table = Table("family", "served", "captured", "replayed", title=title)
    for row in rows:
        table.add_row(row.family, row.served, _yes(row.captured), _yes(row.replayed))
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "no"
