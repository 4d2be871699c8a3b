"""Time against memory: the measured settings of which no other is both faster and smaller. Where the
longest sequences are wanted, all fill the memory: time of a token against length, of which more is better."""

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
    """The Pareto front of seconds a sample and peak bytes (of a token, and length), fastest first."""
    every = [(record, point) for record in records for point in record.points]
    found: list[Measured] = []
    for record, point in sorted(every, key=lambda each: (_pace(each[1]), _need(each[1]))):
        if not found or _need(point) < _need(found[-1][1]):
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
            **({"tokens": point.length} if point.length else {}),
        }
        for record, point in front(records)
    ]


def pareto_section(records: Sequence[Record]) -> str:
    """A chart of all that was measured with the front through it, and the front as a table; empty without a choice."""
    best = front(records)
    if len(best) < 2:
        return ""
    every, lengths = [(record, point) for record in records for point in record.points], best[0][1].length > 0
    each = "token" if lengths else "sample"
    most = "the fastest of sequences so long" if lengths else "the fastest within so much memory"
    notes = [f"{record.label}, micro-batch {point.micro}: {_pace(point) * 1e3:,.3g} ms a {each}, {_shown(point)}"
             for record, point in every]  # fmt: skip
    series = [
        Series(*_places(every), "measured", COLOURS[1], line=False, marks=True, notes=notes),
        Series(*_places(best), most, width=2, marks=True),
    ]
    chart = xy(
        series, ChartAxis("tokens a sequence" if lengths else "GiB at the peak"), ChartAxis(f"ms a {each}", low=0)
    )
    rows = [
        (record.label + (" (yours)" if record.own else ""), f"{point.micro} x {point.accumulation}", _shown(point),
         f"{1 / _pace(point):,.2f}", f"{_pace(point) / _pace(best[0][1]):.2f} x")
        for record, point in best
    ]  # fmt: skip
    head = ("setting", "micro x acc.", "length" if lengths else "memory", f"{each}s/s", "time of the fastest")
    better = "faster and longer" if lengths else "faster and smaller"
    text = f"No other setting that was measured is both {better} than one of these."
    title = f"Time against {'length' if lengths else 'memory'}"
    return section(title, chart, table(head, rows, numbers=(2, 3, 4)), text=text)


def _pace(point: Point) -> float:
    """Seconds of a sample, or of a token where lengths differ."""
    return point.seconds / point.samples / (point.length or 1)


def _need(point: Point) -> int:
    """What is to be small."""
    return -point.length if point.length else point.peak


def _shown(point: Point) -> str:
    return f"{point.length:,} tokens" if point.length else gib(point.peak)


def _places(measured: Sequence[Measured]) -> tuple[list[float], list[float | None]]:
    sizes = [point.length or point.peak / 2**30 for _, point in measured]
    return sizes, [_pace(point) * 1e3 for _, point in measured]
