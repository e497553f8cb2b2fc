"""A job's log says now and then how far a step is; a terminal gets a bar."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from actors.progress import Progress


def test_a_log_gets_a_line_every_thirty_seconds(caplog: pytest.LogCaptureFixture) -> None:
    def clock() -> Iterator[float]:
        yield 100.0
        yield from (100.0 + 10 * sample for sample in range(1, 8))

    ticks = clock()
    with caplog.at_level(logging.INFO, "actors.pipeline"):
        with Progress(400, "step 3", bar=False, clock=lambda: next(ticks)) as progress:
            for _ in range(7):
                progress.update()
    assert [record.getMessage() for record in caplog.records] == [
        "step 3: 3 of 400 samples, 0.1 a second",
        "step 3: 6 of 400 samples, 0.1 a second",
    ]


def test_a_terminal_gets_rays_bar_and_no_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.experimental import tqdm_ray

    told: list[object] = []

    def bar(**options: object) -> SimpleNamespace:
        told.append(options)
        return SimpleNamespace(update=lambda: told.append("update"), close=lambda: told.append("close"))

    monkeypatch.setattr(tqdm_ray, "tqdm", bar)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    with caplog.at_level(logging.INFO, "actors.pipeline"):
        with Progress(2, "step 0") as progress:
            progress.update()
            progress.update()
    assert told == [{"total": 2, "desc": "step 0", "unit": "sample"}, "update", "update", "close"]
    assert not caplog.records
