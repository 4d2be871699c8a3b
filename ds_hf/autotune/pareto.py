"""Time against memory: the measured settings of which no other is both faster and smaller."""

from __future__ import annotations

from collections.abc import Sequence

from ds_hf.autotune.charts import COLOURS, ChartAxis, Series, xy
from ds_hf.autotune.options import gib
from ds_hf.autotune.page import section, table
from ds_hf.autotune.records import Record
from ds_hf.autotune.trial import Point

__all__ = ["Measured", "front", "pareto_section", "rows_of"]

Measured = tuple[Record, Point]


def front(records: Sequence[Record]) -> list[Measured]:
    """The Pareto front of seconds a sample and peak bytes, fastest first."""
    every = [(record, point) for record in records for point in record.points]
    found: list[Measured] = []
    for record, point in sorted(every, key=lambda each: (_pace(each[1]), each[1].peak)):
        if not found or point.peak < found[-1][1].peak:
            found.append((record, point))
    return found


def rows_of(records: Sequence[Record]) -> list[dict[str, object]]:
    """The front as JSON."""
    return [
        {
            "setting": record.setting,
            "micro": point.micro,
            "accumulation": point.accumulation,
            "samples_per_s": point.samples / point.seconds,
            "peak_bytes": point.peak,
        }
        for record, point in front(records)
    ]


def pareto_section(records: Sequence[Record]) -> str:
    """A chart of all that was measured with the front through it, and the front as a table; empty without a choice."""
    best = front(records)
    if len(best) < 2:
        return ""
    every = [(record, point) for record in records for point in record.points]
    series = [
        Series(*_places(every), "measured", COLOURS[1], line=False, marks=True, notes=[_note(*each) for each in every]),
        Series(*_places(best), "the fastest within so much memory", width=2, marks=True),
    ]
    chart = xy(series, ChartAxis("GiB at the peak"), ChartAxis("ms a sample", low=0))
    rows = [
        (record.label + (" (yours)" if record.own else ""), f"{point.micro} x {point.accumulation}", gib(point.peak),
         f"{point.samples / point.seconds:,.2f}", f"{_pace(point) / _pace(best[0][1]):.2f} x")
        for record, point in best
    ]  # fmt: skip
    head = ("setting", "micro x acc.", "memory", "samples/s", "time of the fastest")
    text = "No other setting that was measured is both faster and smaller than one of these."
    return section("Time against memory", chart, table(head, rows, numbers=(2, 3, 4)), text=text)


def _pace(point: Point) -> float:
    return point.seconds / point.samples


def _places(measured: Sequence[Measured]) -> tuple[list[float], list[float | None]]:
    return [point.peak / 2**30 for _, point in measured], [_pace(point) * 1e3 for _, point in measured]


def _note(record: Record, point: Point) -> str:
    return f"{record.label}, micro-batch {point.micro}: {_pace(point) * 1e3:,.3g} ms a sample, {gib(point.peak)}"
