"""When each step of an engine was launched and when its results were taken: a file for the timeline picture.

One JSON object per step and line: `{"step": 7, "tokens": 64, "launched": 0.0412, "finalized": 0.0533}`, where times
are seconds since the first launch in the file.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rollout.engine_stats import StepEvent


class StepSpan(NamedTuple):
    """One step of the engine.

    Attributes:
        tokens: computed in it.
        launched, finalized: when it was handed to the device, and when its results were on the host; seconds.
    """

    step: int
    tokens: int
    launched: float
    finalized: float


def step_spans(events: Iterable[StepEvent]) -> list[StepSpan]:
    """The steps that were launched and finalized; a step of which one event is gone or yet to come is left out.

    >>> step_spans(client.backend.stats.events)[0]
    StepSpan(step=0, tokens=40, launched=0.0, finalized=0.0174)
    """
    launches: dict[int, StepEvent] = {}
    spans: list[StepSpan] = []
    for event in list(events):
        if event.kind == "launch":
            launches[event.step] = event
        elif event.step in launches:
            launch = launches.pop(event.step)
            spans.append(StepSpan(event.step, launch.tokens, launch.seconds, event.seconds))
    start = spans[0].launched if spans else 0.0
    return [s._replace(launched=s.launched - start, finalized=s.finalized - start) for s in spans]


def write_timeline(events: Iterable[StepEvent], path: str | Path) -> int:
    """Write the steps of `events` to `path` and return their number; an engine keeps its last 2,048 steps.

    >>> write_timeline(client.backend.stats.events, "timeline.jsonl")
    37
    """
    spans = step_spans(events)
    Path(path).write_text("".join(json.dumps(span._asdict()) + "\n" for span in spans), encoding="utf-8")
    return len(spans)


def read_timeline(path: str | Path) -> list[StepSpan]:
    """Inverse of `write_timeline`.

    Raises:
        ValueError: the file does not exist, holds no step, or a line is none, with its number.
    """
    if not Path(path).is_file():
        raise ValueError(f"timeline {str(path)!r} does not exist; `moe-rollout sample --timeline FILE` writes one")
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    spans = [_span(str(path), number, line) for number, line in enumerate(lines, 1)]
    if not spans:
        raise ValueError(f"timeline {str(path)!r} holds no step; was anything sampled?")
    return spans


def _span(path: str, number: int, line: str) -> StepSpan:
    try:
        row = json.loads(line)
        span = StepSpan(int(row["step"]), int(row["tokens"]), float(row["launched"]), float(row["finalized"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} line {number}: no step of a timeline: {line:.80}") from error
    if not span.launched <= span.finalized < math.inf:
        raise ValueError(f"{path} line {number}: step {span.step} was not finalized after its launch: {line:.80}")
    return span


def host_work(spans: Sequence[StepSpan]) -> list[tuple[float, float]]:
    """Intervals from the results of a step to the launch of the next: the host processes results and schedules."""
    launches = sorted(span.launched for span in spans)
    following = ((span.finalized, bisect_left(launches, span.finalized)) for span in spans)
    return [(end, launches[index]) for end, index in following if index < len(launches)]


def hidden_share(spans: Sequence[StepSpan]) -> float:
    """Share of the host's work during which a step was in flight: 1.0 all of it was hidden, 0.0 the device waited.

    >>> hidden_share([StepSpan(0, 8, 0.0, 1.0), StepSpan(1, 8, 0.9, 2.0), StepSpan(2, 8, 1.2, 3.0)])
    1.0

    Raises:
        ValueError: no step was launched after another's results.
    """
    work = _union(host_work(spans))
    total = sum(end - start for start, end in work)
    if not total:
        raise ValueError(f"{len(spans)} steps of which none was launched after another's results; sample for longer")
    in_flight = _union((span.launched, span.finalized) for span in spans)
    return sum(max(0.0, min(end, b) - max(start, a)) for start, end in work for a, b in in_flight) / total


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def typical_window(spans: Sequence[StepSpan], steps: int) -> Sequence[StepSpan]:
    """`steps` successive steps, of all such windows the one at the lower quartile of duration: it holds no pause."""
    if len(spans) <= steps:
        return spans
    starts = range(len(spans) - steps + 1)
    ordered = sorted(starts, key=lambda i: spans[i + steps - 1].finalized - spans[i].launched)
    first = ordered[len(ordered) // 4]
    return spans[first : first + steps]
