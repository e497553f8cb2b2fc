"""Read rows of many files: what is needed of each, opened together, joined with later facts, some rows at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from storage.annotations import Annotations, join
from storage.catalog import Catalog, Place
from storage.errors import DamagedDataError
from storage.part import ROW_GROUP_SAMPLES
from storage.part_reader import PartReader, missing
from storage.schema import COLUMNS
from storage.store import Store
from storage.trace import RoutingSpec, Trace


class Sources(NamedTuple):
    """What a dataset reads from."""

    store: Store
    spec: RoutingSpec
    catalog: Catalog
    annotations: Annotations


class Row(NamedTuple):
    """One row of one part file."""

    place: Place
    row: int


class _Opened(NamedTuple):
    place: Place
    file: Any
    steps: list[int]


def iter_traces(sources: Sources, steps: Sequence[int]) -> Iterator[Trace]:
    """Traces of these steps; one row group is in memory."""
    for place, part, wanted in _parts(sources, steps):
        facts = sources.annotations.of(wanted)
        for table in part.tables(place.start, place.stop):
            yield from part.decode(join(table, facts) if facts else table)


def read_sample(sources: Sources, sample_id: str) -> Trace | None:
    """One sample; None when there is none."""
    found = sources.catalog.find(sample_id)
    if found is None:
        return None
    try:
        return _read_row(sources, *found)
    except FileNotFoundError as error:
        sources.catalog.refresh()  # compacted since the last refresh, or damaged
        if sources.catalog.find(sample_id) in (None, found):
            raise missing(sources.store.url(found[0].name)) from error
        return read_sample(sources, sample_id)


def rows_of(sources: Sources, steps: Sequence[int]) -> list[Place]:
    """Where the samples of these steps lie, in order."""
    return [place for step in steps for place in sources.catalog.places(step)]


def read_rows(sources: Sources, rows: Iterable[Row]) -> Iterator[Trace]:
    """Single rows in the order given. Neighbours that follow one another in a file are read together, up to 16."""
    for run in _runs(rows):
        place = run[0].place
        facts = sources.annotations.of(s for s, _ in sources.catalog.manifest(place.name.partition("/")[0]).steps)
        with PartReader.open(sources.store, place.name, sources.spec) as part:
            for table in part.tables(run[0].row, run[-1].row + 1):
                yield from part.decode(join(table, facts) if facts else table)


def _runs(rows: Iterable[Row]) -> Iterator[list[Row]]:
    run: list[Row] = []
    for row in rows:
        if run and (len(run) == ROW_GROUP_SAMPLES or row != Row(run[-1].place, run[-1].row + 1)):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _read_row(sources: Sources, place: Place, row: int) -> Trace:
    facts = sources.annotations.of(step for step, _ in sources.catalog.manifest(place.name.partition("/")[0]).steps)
    expected, url = place.file.sample_ids[row], sources.store.url(place.name)
    with PartReader(sources.store.open(place.name), url, sources.spec) as part:
        (table,) = part.tables(row, row + 1)
        (trace,) = part.decode(join(table, facts) if facts else table)
    if trace.sample_id != expected:
        raise DamagedDataError(f"{url} row {row} is {trace.sample_id!r}, not {expected!r}")
    return trace


def iter_batches(
    sources: Sources, steps: Sequence[int], columns: Sequence[str], filter: pc.Expression | None
) -> Iterator[pa.RecordBatch]:
    """Columns of the rows that pass `filter`, pushed down to the Parquet reader where no annotation changes rows."""
    for place, part, wanted in _parts(sources, steps):
        facts = sources.annotations.of(wanted)
        chosen = None if _is_whole(place) else pc.field("step").isin(wanted)
        if not facts:
            yield from part.batches(columns, _both(chosen, filter))
            continue
        for batch in part.batches(_needed(columns, filter), chosen):
            table = join(pa.table(batch), facts)
            yield from pads.dataset(table).scanner(columns=list(columns), filter=filter).to_batches()


def _is_whole(place: Place) -> bool:
    return (place.start, place.stop) == (0, place.file.rows)


def _both(one: pc.Expression | None, other: pc.Expression | None) -> pc.Expression | None:
    return one & other if one is not None and other is not None else one if one is not None else other


def _needed(columns: Sequence[str], filter: pc.Expression | None) -> list[str]:
    """`columns`, sample_id, and those that the text of the filter names: an expression does not list its fields."""
    words = set(re.findall(r"\w+", str(filter)))
    return [name for name in COLUMNS if name in {*columns, "sample_id"} | words]


def _parts(sources: Sources, steps: Sequence[int]) -> Iterator[tuple[Place, PartReader, list[int]]]:
    """Each file once, with the rows and steps wanted of it. Steps of one folder are opened together: a file that is
    open stays readable when its folder is compacted or dropped, so a folder is read whole or from its successor."""
    for _, group in groupby(steps, sources.catalog.folder):
        with ExitStack() as stack:
            for place, file, wanted in _open_together(sources, list(group), stack):
                yield place, PartReader(file, sources.store.url(place.name), sources.spec), wanted


def _open_together(sources: Sources, steps: list[int], stack: ExitStack) -> list[_Opened]:
    try:
        return _open(sources, steps, stack)
    except FileNotFoundError as error:
        sources.catalog.refresh()  # compacted since the last refresh, or damaged
        try:
            return _open(sources, steps, stack)
        except FileNotFoundError:
            raise missing(str(error.filename or error)) from error
        except KeyError:
            raise ValueError(
                f"steps {steps} of {sources.store.url('')} were dropped while they were read; refresh() shows the rest"
            ) from error


def _open(sources: Sources, steps: list[int], stack: ExitStack) -> list[_Opened]:
    opened: list[_Opened] = []
    for step in steps:
        for place in sources.catalog.places(step):
            if opened and opened[-1].place.name == place.name and opened[-1].place.stop == place.start:
                before = opened.pop()
                joined = place._replace(start=before.place.start)
                opened.append(_Opened(joined, before.file, [*before.steps, step]))
            else:
                file = stack.enter_context(sources.store.open(place.name))
                opened.append(_Opened(place, file, [step]))
    return opened
