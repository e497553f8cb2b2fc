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
    "DamagedDataError": "errors",
    "DatasetError": "errors",
    "DatasetInUseError": "errors",
    "DuplicateSampleError": "errors",
    "FormatVersionError": "errors",
    "Lease": "lease",
    "MergedTrace": "turns",
    "ReplayBatch": "batch",
    "RoutingSpec": "trace",
    "Site": "trace",
    "SpecMismatchError": "errors",
    "StepExistsError": "errors",
    "Trace": "trace",
    "TraceDataset": "dataset",
    "TraceWriter": "writer",
    "UnknownCommitError": "errors",
    "WeightSpan": "trace",
    "clean_staging": "staging",
    "merge_turns": "turns",
    "repair_dataset": "verify",
    "validate_trace": "validate",
    "verify_dataset": "verify",
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
    if name not in _HOME:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    return getattr(importlib.import_module(f"storage.{_HOME[name]}"), name)
