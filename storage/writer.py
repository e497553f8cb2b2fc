"""TraceWriter: traces to staged Parquet files; a step becomes visible all at once, by one directory rename.

Readers and crashes see a step's directory with everything in it, or no directory. Files, manifest and staging
directory are fsynced before the rename and the dataset directory after it: a committed step survives
power loss.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, get_args

import pyarrow as pa

from storage.card import write_card
from storage.catalog import Catalog
from storage.committed import CommittedSamples
from storage.errors import DuplicateSampleError, SpecMismatchError, StepExistsError
from storage.manifest import DATASET_FILE, MANIFEST_FILE, dataset_json, read_promises, read_spec, step_folder
from storage.open_folder import OpenFolder, new_place
from storage.part import ROW_GROUP_SAMPLES, Compression, check_sizes
from storage.promises import Promises
from storage.schema import check_same_spec, conform, spec_of, table_problems, to_table
from storage.staging import check_writable, clean_staging, create_dataset, staging_lock
from storage.store import LocalStore, Root, Store, is_remote, local_path, open_store
from storage.trace import RoutingSpec, Trace

logger = logging.getLogger(__name__)


class TraceWriter:
    """Writes one dataset. Several steps may be open at once; every method is thread-safe.

    >>> with TraceWriter("traces/", spec) as writer:  # creates the dataset, or checks that it has this spec
    ...     writer.write([trace, ...], step=0)        # staged on disk, invisible
    ...     writer.write(to_table(more, spec), step=0)
    ...     writer.commit(step=0)                     # traces/step-000000000/ appears
    >>> writer.committed_steps()
    [0]

    Leaving the block, by its end or by an exception, drops every step that was not committed. Opening also
    removes what dead writers of this host left behind. `compression="none"` makes files about an eighth larger that
    read faster; a reader takes either. `run`, JSON values, goes into the run.json of a dataset that is created here,
    without secrets; see storage/card.py.

    Raises:
        SpecMismatchError: when the dataset holds traces of another model, or promises more about its routes
            than this writer.
        FormatVersionError: when another release wrote the dataset.
    """

    def __init__(
        self,
        root: Root,
        spec: RoutingSpec,
        *,
        max_part_bytes: int = 256 << 20,
        promises: Promises | None = None,
        compression: Compression = "zstd",
        run: Mapping[str, Any] | None = None,
    ) -> None:
        if compression not in get_args(Compression):
            raise ValueError(f"compression is {compression!r}, need one of {get_args(Compression)}")
        self.root: Any = str(root) if is_remote(root) else local_path(root)
        self.spec, self.max_part_bytes, self._compression = spec, max_part_bytes, compression
        self._store = open_store(root)
        promises = promises or Promises()
        _prepare(self._store, spec, promises, run)
        check_same_spec(spec, read_spec(self._store), f"the dataset {self.root}")
        if broken := read_promises(self._store).broken_by(promises):
            raise SpecMismatchError(f"the dataset {self.root} {broken}; write to another dataset")
        if isinstance(self._store, LocalStore):
            clean_staging(self.root)
        self._catalog = Catalog(self._store)
        self._committed = CommittedSamples(self._catalog)
        self._lock = threading.RLock()
        self._open: dict[int, OpenFolder] = {}
        self._closed = False

    def committed_steps(self) -> list[int]:
        """Steps that readers can see, ascending; other writers' too."""
        with self._lock:
            self._catalog.refresh()
            return list(self._catalog.steps)

    def taken_steps(self) -> list[int]:
        """Steps that cannot be written: the committed ones and, of those that were dropped, the last."""
        steps = self.committed_steps()
        first = self._catalog.first_step
        return [first - 1, *steps] if first > 0 else steps

    def next_step(self) -> int:
        """One more than the largest step that is committed, dropped or open here; 0 for an empty dataset."""
        with self._lock:
            last = max([*self.committed_steps(), *self._open], default=-1)
            return max(last + 1, self._catalog.first_step)

    def write(self, traces: Sequence[Trace] | pa.Table, *, step: int) -> None:
        """Stage traces, or a table of `to_table`, for `step`. `[]` opens a step that may stay empty.

        Raises:
            StepExistsError, DuplicateSampleError, SpecMismatchError: nothing of this call is staged.
            ValueError: the same; a trace has finish_reason "error", another step, contradicts itself, or is too large.
            OSError: the disk failed or is full; the step is abandoned, committed steps are intact.
        """
        with self._lock:
            self._check_usable(step)
            tables = self._tables(traces)
            self._check_rows(tables, step)
            self._check_new([i for table in tables for i in table.column("sample_id").to_pylist()], step)
            with self._abandoning(step):
                if step not in self._open:
                    place = new_place(self._store, f"{step:09d}", step_folder(step))
                    self._open[step] = OpenFolder(place, self.spec, self.max_part_bytes, self._compression)
                for table in tables:
                    self._open[step].write(table)

    def commit(self, step: int) -> None:
        """Make what was staged for `step` visible, all at once and durably.

        Raises:
            ValueError: when nothing was written for `step`.
            StepExistsError, DuplicateSampleError: when another writer was faster; the step is abandoned.
            OSError: the disk failed or is full; the step is abandoned, committed steps are intact.
            UnknownCommitError: an object store did not answer; the step is abandoned here and may be committed.
        """
        with self._lock:
            self._check_usable(step)
            if step not in self._open:
                raise ValueError(
                    f"nothing was written for step {step}, so there is nothing to commit; call write() first"
                )
            with self._abandoning(step):
                self._publish(step, self._open[step])
            self._open.pop(step).settle()
            logger.info("committed step %d to %s", step, self.root)

    def abandon(self, step: int) -> None:
        """Drop what was staged for `step`, if anything was."""
        with self._lock:
            open_step = self._open.pop(step, None)
            if open_step is not None:
                open_step.remove()

    def close(self) -> None:
        """Abandon every step that was not committed. Further writes are refused; closing twice is fine."""
        with self._lock:
            if self._open:
                logger.warning("dropping steps %s of %s: they were not committed", sorted(self._open), self.root)
            for step in list(self._open):
                self.abandon(step)
            if not self._closed:
                self._committed.save_index()
            self._closed = True

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self, step: int) -> None:
        if self._closed:
            raise ValueError(f"this TraceWriter of {self.root} is closed; open a new one")
        if step < 0:
            raise ValueError(f"step {step} is negative")
        if step not in self._open:
            self._catalog.refresh()
            self._check_free(step)

    def _check_free(self, step: int) -> None:
        if step in self._catalog or self._store.size(f"{step_folder(step)}/{MANIFEST_FILE}") is not None:
            raise self._step_exists(step)
        if step < self._catalog.first_step:
            raise ValueError(
                f"steps before {self._catalog.first_step} of {self.root} were dropped; go on with {self.next_step()}"
            )

    def _step_exists(self, step: int) -> StepExistsError:
        alone = self._store.size(f"{step_folder(step)}/{MANIFEST_FILE}") is not None  # not in a pack with others
        again = f", or remove {self._store.url(step_folder(step))} to sample it again" if alone else ""
        return StepExistsError(
            f"step {step} is committed in {self.root} already, and a committed step never changes; go on "
            f"with step {self.next_step()}{again}"
        )

    def _tables(self, traces: Sequence[Trace] | pa.Table) -> list[pa.Table]:
        if not isinstance(traces, pa.Table):
            starts = range(0, len(traces), ROW_GROUP_SAMPLES)
            return [to_table(traces[start : start + ROW_GROUP_SAMPLES], self.spec) for start in starts]
        check_same_spec(spec_of(traces.schema), self.spec, f"the dataset {self.root}")
        if problems := table_problems(traces, self.spec):
            raise ValueError("; ".join(problems[:3]))
        return [conform(traces)]

    def _check_rows(self, tables: list[pa.Table], step: int) -> None:
        for table in tables:
            check_sizes(table)
            for row in table.select(["sample_id", "step", "finish_reason", "error"]).to_pylist():
                name = f"trace {row['sample_id']!r}"
                if row["finish_reason"] == "error":
                    raise ValueError(f"{name} failed ({row['error']}): leave it out, or sample it again")
                if row["step"] != step:
                    raise ValueError(f"{name} is of step {row['step']} and cannot be written to step {step}")

    def _check_new(self, sample_ids: list[str], step: int) -> None:
        if step not in self._open:
            self._committed.refresh()
        staged = self._open[step].sample_ids if step in self._open else set()
        for sample_id, count in Counter(sample_ids).items():
            if count > 1 or sample_id in staged:
                raise DuplicateSampleError(f"sample_id {sample_id!r} was written to step {step} before")
            self._check_not_committed(sample_id, step)

    def _check_not_committed(self, sample_id: str, step: int) -> None:
        if (owner := self._committed.step_of(sample_id)) == step:  # committed since the caller looked
            raise self._step_exists(step)
        if owner is not None:
            raise DuplicateSampleError(f"sample_id {sample_id!r} is committed in step {owner} of {self.root} already")

    def _publish(self, step: int, open_step: OpenFolder) -> None:
        open_step.seal([(step, len(open_step.sample_ids))])
        local = isinstance(self._store, LocalStore)
        with staging_lock(self.root) if local else nullcontext():  # writers of this host publish one after the other
            self._committed.refresh()
            self._check_free(step)
            for sample_id in open_step.sample_ids:
                self._check_not_committed(sample_id, step)
            try:
                open_step.publish()
            except FileExistsError as error:  # a writer on another host was faster
                raise self._step_exists(step) from error

    @contextmanager
    def _abandoning(self, step: int) -> Iterator[None]:
        """Abandon `step` on any failure: what is staged may be incomplete. Say so when the disk failed."""
        try:
            yield
        except BaseException as error:
            self.abandon(step)
            if not isinstance(error, OSError):
                raise
            text = f"{error.strerror or error} (step {step} was abandoned and may be written again)"
            raise OSError(error.errno, text, error.filename or str(self.root)) from error


def _prepare(store: Store, spec: RoutingSpec, promises: Promises, run: Mapping[str, Any] | None) -> None:
    """Make it a dataset of `spec` unless it is one already; of several racers one does, and adds the card."""
    if isinstance(store, LocalStore):
        created = create_dataset(store.root, spec, promises)
        check_writable(store.root)
    else:
        created = False
        with suppress(FileExistsError):
            store.create(DATASET_FILE, dataset_json(spec, promises).encode())
            created = True
    if created:
        write_card(store, spec, promises, run)
