"""Traces on disk and in Arrow. Needs numpy and pyarrow only: importing it loads neither torch nor ray. Names load
lazily: an engine without a dataset needs no code that reads one."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036 (for who runs a clone: pip would have refused)
    raise ImportError(
        f"moe-rollout needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}; next: "
        "python3.11 -m venv .venv && . .venv/bin/activate && pip install ."
    )

if TYPE_CHECKING:
    from storage.batch import ReplayBatch
    from storage.dataset import TraceDataset
    from storage.errors import (
        DamagedDataError,
        DatasetError,
        DatasetInUseError,
        DuplicateSampleError,
        FormatVersionError,
        SpecMismatchError,
        StepExistsError,
        UnknownCommitError,
    )
    from storage.lease import Lease
    from storage.staging import clean_staging
    from storage.trace import RoutingSpec, Site, Trace, WeightSpan
    from storage.turns import MergedTrace, merge_turns
    from storage.validate import validate_trace
    from storage.verify import repair_dataset, verify_dataset
    from storage.writer import TraceWriter

_HOME = {
    "batch": ("ReplayBatch",),
    "dataset": ("TraceDataset",),
    "errors": (
        "DamagedDataError",
        "DatasetError",
        "DatasetInUseError",
        "DuplicateSampleError",
        "FormatVersionError",
        "SpecMismatchError",
        "StepExistsError",
        "UnknownCommitError",
    ),
    "lease": ("Lease",),
    "staging": ("clean_staging",),
    "trace": ("RoutingSpec", "Site", "Trace", "WeightSpan"),
    "turns": ("MergedTrace", "merge_turns"),
    "validate": ("validate_trace",),
    "verify": ("repair_dataset", "verify_dataset"),
    "writer": ("TraceWriter",),
}
__all__ = [
    "DamagedDataError",
    "DatasetError",
    "DatasetInUseError",
    "DuplicateSampleError",
    "FormatVersionError",
    "Lease",
    "MergedTrace",
    "ReplayBatch",
    "RoutingSpec",
    "Site",
    "SpecMismatchError",
    "StepExistsError",
    "Trace",
    "TraceDataset",
    "TraceWriter",
    "UnknownCommitError",
    "WeightSpan",
    "clean_staging",
    "merge_turns",
    "repair_dataset",
    "validate_trace",
    "verify_dataset",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"storage.{module}"), name)
    raise AttributeError(f"module 'storage' has no attribute {name!r}")
