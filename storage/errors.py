"""What can go wrong with a dataset, by name."""

from __future__ import annotations

RESTORE = "restore it, or remove its step and sample that again"
"""What to do about a file that is damaged or missing."""


class DatasetError(ValueError):
    """Base of the errors below."""


class FormatVersionError(DatasetError):
    """The data was written by a newer format, or is no trace data at all."""


class SpecMismatchError(DatasetError):
    """Traces of one model meet a dataset of another."""


class StepExistsError(DatasetError):
    """The step is already committed; a committed step never changes."""


class UnknownCommitError(DatasetError):
    """An object store neither confirmed nor refused a commit. It may be there, now or in a moment, or never."""


class DatasetInUseError(DatasetError):
    """Another process holds the lease of the dataset, or compacts or archives it."""


class DuplicateSampleError(DatasetError):
    """A sample_id appears a second time, in the same step or in a committed one."""


class DamagedDataError(DatasetError):
    """A committed file is missing, cut short or altered."""


class MissingDataError(DamagedDataError):
    """A committed file is not there. Readers look again first: it may have been compacted or dropped."""
