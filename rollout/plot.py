"""`moe-rollout plot` and `moe-rollout report`: pictures of a dataset as files, or in one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from rollout.canvas import Picture, need_matplotlib, png
from rollout.dataset_tables import dataset_tables
from rollout.drift_pictures import drift_pictures
from rollout.look import compare_table, drift_json
from rollout.pictures import survey_pictures
from rollout.report import write_report
from rollout.run_pictures import mismatch, timeline
from storage import TraceDataset
from storage.drift import Drift, compare_datasets
from storage.summary import summarise
from storage.survey import survey_dataset

MOVERS = 4


def plot(options: argparse.Namespace) -> int:
    """Write each picture to a PNG file and print its path."""
    need_matplotlib()
    pictures = all_pictures(options, _drift(options))
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        file = out / f"{picture.name}.png"
        file.write_bytes(png(picture, titled=True))
        sys.stdout.write(f"{file}\n")
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the HTML page and print its path."""
    need_matplotlib()
    drift = _drift(options)
    figures = summarise(TraceDataset(options.dir))
    tables = [*dataset_tables(figures), *([] if drift is None else [_drift_table(options, drift)])]
    write_report(options.out, figures, all_pictures(options, drift), tables)
    sys.stdout.write(f"{options.out}\n")
    return 0


def all_pictures(options: argparse.Namespace, drift: Drift | None) -> list[Picture]:
    """What the dataset gives, then what the other sources give that were named."""
    pictures = survey_pictures(survey_dataset(TraceDataset(options.dir)))
    if drift is not None:
        pictures += drift_pictures(drift, options.dir, options.against)
    if options.mismatch is not None:
        pictures.append(mismatch(options.mismatch))
    if options.timeline:
        pictures.append(timeline(options.timeline))
    return pictures


def _drift(options: argparse.Namespace) -> Drift | None:
    if options.against is None:
        return None
    return compare_datasets(TraceDataset(options.dir), TraceDataset(options.against))


def _drift_table(options: argparse.Namespace, drift: Drift) -> Table:
    found: dict[str, Any] = drift_json(drift, options.dir, options.against)
    return compare_table(found, MOVERS)
