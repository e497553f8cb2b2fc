"""Read rows of many files: what is needed of each, opened together, joined with later facts, some rows at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from storage.annotations import Annotations, join
from storage.catalog import Catalog, Place, Rows
from storage.errors import MissingDataError
from storage.filters import both, columns_with
from storage.part import ROW_GROUP_SAMPLES
from storage.part_reader import PartReader, open_part
from storage.store import Store
from storage.trace import RoutingSpec, Trace


class Sources(NamedTuple):
    """What a dataset reads from."""

    store: Store
    spec: RoutingSpec
    catalog: Catalog
    annotations: Annotations


class Row(NamedTuple):
    """One row of one part file; its sample id, or its number in the step, finds it again after a compaction."""

    name: str
    row: int
    step: int
    sample: str | int


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

    def read() -> Trace | None:
        found = sources.catalog.find(sample_id)
        return None if found is None else next(_read_run(sources, [Row(*found, sample_id)]))

    return sources.catalog.retry(read)


def rows_at(sources: Sources, numbers: Iterable[tuple[int, int]]) -> Iterator[Row]:
    """Where samples lie that are given as (step, number within the step)."""
    for step, group in groupby(numbers, lambda pair: pair[0]):
        places = _places(sources, step)
        ends = list(accumulate(place.stop - place.start for place in places))
        for _, number in group:
            place = places[index := bisect_right(ends, number)]
            yield Row(place.name, place.stop - ends[index] + number, step, number)


def _places(sources: Sources, step: int) -> list[Rows]:
    try:
        return sources.catalog.retry(lambda: sources.catalog.rows(step))
    except KeyError as error:
        raise dropped(sources, error) from error


def read_rows(sources: Sources, rows: Iterable[Row]) -> Iterator[Trace]:
    """Single rows in the order given. Neighbours that follow one another in a file are read together, up to 16."""
    for run in _runs(rows):
        try:
            yield from list(_read_run(sources, run))
        except MissingDataError:  # compacted since, perhaps
            sources.catalog.refresh()
            for row in run:
                if (trace := _read_again(sources, row)) is None:
                    raise
                yield trace


def _read_again(sources: Sources, row: Row) -> Trace | None:
    if isinstance(row.sample, str):
        return read_sample(sources, row.sample)
    where = [(row.step, row.sample)]
    return sources.catalog.retry(lambda: next(_read_run(sources, list(rows_at(sources, where)))))


def _read_run(sources: Sources, run: Sequence[Row]) -> Iterator[Trace]:
    with PartReader.open(sources.store, run[0].name, sources.spec) as part:
        facts = sources.annotations.of(row.step for row in run)
        for table in part.tables(run[0].row, run[-1].row + 1):
            yield from part.decode(join(table, facts) if facts else table)


def _runs(rows: Iterable[Row]) -> Iterator[list[Row]]:
    run: list[Row] = []
    for row in rows:
        if run and (len(run) == ROW_GROUP_SAMPLES or (row.name, row.row) != (run[-1].name, run[-1].row + 1)):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def iter_batches(
    sources: Sources, steps: Sequence[int], columns: Sequence[str], filter: pc.Expression | None
) -> Iterator[pa.RecordBatch]:
    """Columns of the rows that pass `filter`, pushed down to the Parquet reader where no annotation changes rows."""
    for place, part, wanted in _parts(sources, steps):
        facts = sources.annotations.of(wanted)
        chosen = None if _is_whole(place) else pc.field("step").isin(wanted)
        if not facts:
            yield from part.batches(columns, both(chosen, filter))
            continue
        for batch in part.batches(columns_with([*columns, "sample_id"], filter), chosen):
            table = join(pa.table(batch), facts)
            yield from pads.dataset(table).scanner(columns=list(columns), filter=filter).to_batches()


def _is_whole(place: Place) -> bool:
    return (place.start, place.stop) == (0, place.file.rows)


def _parts(sources: Sources, steps: Sequence[int]) -> Iterator[tuple[Place, PartReader, list[int]]]:
    """Each file once, with the rows and steps wanted of it. Steps of one folder are opened together: a file that is
    open stays readable when its folder is compacted or dropped, so a folder is read whole or from its successor."""
    for _, group in groupby(steps, sources.catalog.folder):
        with ExitStack() as stack:
            for place, file, wanted in _open_together(sources, list(group), stack):
                yield place, PartReader(file, sources.store.url(place.name), sources.spec), wanted


def _open_together(sources: Sources, steps: list[int], stack: ExitStack) -> list[_Opened]:
    try:
        return sources.catalog.retry(lambda: _open(sources, steps, stack))
    except KeyError as error:
        raise dropped(sources, error) from error


def dropped(sources: Sources, step: KeyError) -> ValueError:
    """For the KeyError of a step that the catalog knows no longer."""
    return ValueError(f"step {step} of {sources.store.url('')} was dropped while it was read; refresh() shows the rest")


def _open(sources: Sources, steps: list[int], stack: ExitStack) -> list[_Opened]:
    opened: list[_Opened] = []
    for step in steps:
        for place in sources.catalog.places(step):
            if opened and opened[-1].place.name == place.name and opened[-1].place.stop == place.start:
                before = opened.pop()
                joined = place._replace(start=before.place.start)
                opened.append(_Opened(joined, before.file, [*before.steps, step]))
            else:
                opened.append(_Opened(place, stack.enter_context(open_part(sources.store, place.name)), [step]))
    return opened
