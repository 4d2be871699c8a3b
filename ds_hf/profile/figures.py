"""The plots of a report, as SVG text in the style of the autotuner's charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape

from ds_hf.autotune.charts import COLOURS, LETTER, Bar, ChartAxis, Mark, Series, bars, xy
from ds_hf.profile.analysis import Analysis
from ds_hf.profile.load import Rank, StepRecord
from ds_hf.profile.verdict import NAMES, milliseconds

__all__ = ["heat_map", "history", "legend", "memory", "segments", "timeline", "typical_step", "waterfall"]

COLOUR = {
    "compute": "#2f6db5", "gather": "#d9822b", "reduction": "#c0392b", "tensor": "#8250df", "sequence": "#b03060",
    "experts": "#c2255c",
    "collective": "#a05a2c", "pipeline": "#6b7785", "update": "#1a7f37", "offload": "#00798c", "loader": "#b8860b",
    "checkpoint": "#5b8c5a", "evaluation": "#4c9f9f", "script": "#98a2ad", "report": "#57606a",
}  # fmt: skip
MOST_RANKS = 32  # of a timeline
MOST_PLACES = 48  # of a heat map
LEFT, TOP, RIGHT, WIDTH = 74, 12, 18, 860
LEAN = 50  # degrees by which the places of a heat map lean


def legend(kinds: Sequence[str]) -> str:
    """Which colour is which, as HTML."""
    chips = (
        f'<span style="white-space:nowrap"><svg class="chip" width="12" height="12" style="vertical-align:-1px">'
        f'<rect width="12" height="12" rx="2" fill="{COLOUR[kind]}"/></svg> {escape(NAMES[kind])}</span>'
        for kind in kinds
    )
    return f'<p class="dim" style="display:flex;flex-wrap:wrap;gap:.2rem 1.1rem">{"".join(chips)}</p>'


def segments(rank: Rank, step: StepRecord) -> list[tuple[str, str, float, float]]:
    """The step without gaps and overlaps: kind, place, begin and end in seconds; neighbours of one kind and place are
    one."""
    found: list[tuple[str, str, float, float]] = []
    cursor, around = 0.0, [("script", "outside of the engine", step.seconds)]

    def until(end: float) -> None:
        nonlocal cursor
        kind, place, _ = around[-1]
        if end <= cursor:
            return
        if found and found[-1][:2] == (kind, place):
            found[-1] = (kind, place, found[-1][2], end)
        else:
            found.append((kind, place, cursor, end))
        cursor = end

    for span in step.spans:
        while len(around) > span.depth + 1:
            until(around[-1][2])
            around.pop()
        until(span.start)
        key = rank.keys[span.key]
        around.append((key.kind, key.place, span.start + span.seconds))
    while around:
        until(around[-1][2])
        around.pop()
    return found


def typical_step(analysis: Analysis) -> int:
    """The number of the step whose length is the median."""
    lengths = {n: statistics.fmean(rank.steps[n].seconds for rank in analysis.run.ranks) for n in analysis.steps}
    middle = statistics.median_low(lengths.values())
    return next(number for number, length in lengths.items() if length == middle)


def timeline(analysis: Analysis, number: int) -> str:
    """One step over the ranks, with what ran on communication streams below each."""
    run = analysis.run
    start = min(rank.steps[number].begin for rank in run.ranks)
    same = len({rank.header["clock"] for rank in run.ranks}) == 1 and run.header["clock"]
    rows = []
    for rank in run.ranks[:MOST_RANKS]:
        step = rank.steps[number]
        shift = (step.begin - start if same else 0.0) * 1e3
        for kind, place, begin, end in segments(rank, step):
            note = f"rank {rank.number}, {NAMES[kind]}, {place}: {milliseconds(end - begin)}"
            rows.append(Bar(f"rank {rank.number}", shift + begin * 1e3, shift + end * 1e3, COLOUR[kind], note=note))
        for span in step.beside:
            key, label = rank.keys[span.key], f"rank {rank.number}, streams"
            note = f"{key.operation} of {key.place}: {milliseconds(span.seconds)}"
            begin = shift + span.start * 1e3
            rows.append(Bar(label, begin, begin + span.seconds * 1e3, COLOUR[key.kind], note=note))
    return bars(rows, ChartAxis(f"ms, step {number}", low=0))


def waterfall(analysis: Analysis) -> str:
    """From the time that the arithmetic alone would take to the step, in milliseconds."""
    kinds = analysis.kinds
    parts: list[tuple[str, float, str]] = []
    compute = kinds.get("compute", 0.0)
    floor = min(analysis.floor, compute)
    if floor > 0:
        parts.append(("arithmetic at the full matrix rate", floor, "#1f4e86"))
        parts.append(("forward and backward beyond that", compute - floor, COLOUR["compute"]))
    else:
        parts.append((NAMES["compute"], compute, COLOUR["compute"]))
    parts += [(NAMES[kind], seconds, COLOUR[kind]) for kind, seconds in kinds.items() if kind != "compute"]
    rows, at = [], 0.0
    for label, seconds, colour in parts:
        if seconds >= 0.001 * analysis.seconds:
            text = f"{milliseconds(seconds)}, {seconds / analysis.seconds:.0%}"
            rows.append(Bar(label, at * 1e3, (at + seconds) * 1e3, colour, text))
        at += seconds
    rows.append(Bar("a step", 0.0, at * 1e3, "#57606a", milliseconds(at)))
    return bars(rows, ChartAxis("ms", low=0, high=1.25 * at * 1e3))


def heat_map(analysis: Analysis) -> str:
    """Ranks by places: how much longer a rank takes there than the others do, in the median; empty for one rank."""
    ranks = analysis.run.ranks
    if len(ranks) < 2:
        return ""
    above = {place: _above(times) for place, times in analysis.places.items()}
    places = sorted(above, key=lambda place: -max(above[place]))[:MOST_PLACES]
    places = [place for place in above if place in set(places)]
    top = max([max(above[place]) for place in places] or [0.0]) or 1e-9
    left = _left_of(places)
    width = (WIDTH - left - RIGHT) / max(len(places), 1)
    height = 24 if len(ranks) <= 32 else 10
    label_room = LETTER * max(map(len, places), default=0) * math.sin(math.radians(LEAN)) + 24
    bottom = TOP + height * len(ranks)
    parts = []
    for row, rank in enumerate(ranks):
        y = TOP + row * height
        if height > 20 or row % 4 == 0:
            parts.append(
                f'<text x="{left - 8:.0f}" y="{y + height / 2 + 4:.0f}" text-anchor="end">rank {rank.number}</text>'
            )
        for column, place in enumerate(places):
            seconds = above[place][row]
            x, shade = left + column * width, min(1.0, seconds / top)
            note = f"rank {rank.number}, {place}: {milliseconds(analysis.places[place][row])}, "
            note += f"{milliseconds(seconds)} above the others" if seconds > 0 else "not above the others"
            parts.append(
                f'<rect class="grid" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{COLOUR["reduction"]}" '
                f'opacity="{shade:.2f}"><title>{escape(note)}</title></rect>'
            )
            if shade > 0.55 and width > 46 and height > 20:
                middle = x + width / 2
                parts.append(f'<text class="inside" x="{middle:.0f}" y="{y + height / 2 + 4:.0f}" '
                             f'text-anchor="middle">{milliseconds(seconds)}</text>')  # fmt: skip
    every = max(1, -(-14 // max(int(width), 1)))
    for column, place in enumerate(places):
        if column % every == 0:
            x = left + column * width + width / 2
            parts.append(f'<text x="{x:.0f}" y="{bottom + 12}" text-anchor="end" '
                         f'transform="rotate({-LEAN} {x:.0f} {bottom + 12})">{escape(place)}</text>')  # fmt: skip
    svg_height = bottom + label_room
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {svg_height:.0f}" role="img">{"".join(parts)}</svg>'


def _left_of(places: Sequence[str]) -> float:
    """Where the first column begins, so that no place leans over the edge of the plot."""
    lean, left = math.cos(math.radians(LEAN)), float(LEFT)
    for _ in range(3):  # columns become narrower as it moves to the right
        width = (WIDTH - left - RIGHT) / max(len(places), 1)
        reach = [LETTER * len(place) * lean - (column + 0.5) * width for column, place in enumerate(places)]
        left = max([float(LEFT), *reach])
    return left


def _above(times: Sequence[float]) -> list[float]:
    found = []
    for index, mine in enumerate(times):
        others = [*times[:index], *times[index + 1 :]]
        found.append(max(0.0, mine - statistics.median(others)))
    return found


def history(analysis: Analysis) -> list[str]:
    """Tokens a second and MFU over the recorded steps; empty where tokens are not known."""
    if len(analysis.history) < 2:
        return []
    steps = list(analysis.history)
    rates, mfus = zip(*analysis.history.values(), strict=True)
    made = []
    for values, title, colour, percent in ((rates, "tokens/s", COLOURS[0], False), (mfus, "MFU", COLOURS[2], True)):
        notes = [f"step {s}: {v:.1%}" if percent else f"step {s}: {v:,.0f} tokens/s" for s, v in
                 zip(steps, values, strict=True)]  # fmt: skip
        series = [Series(steps, values, colour=colour, marks=len(steps) <= 80, size=3, notes=notes)]
        y = ChartAxis(title, low=0, high=max(values) * 1.1 or 1.0, percent=percent and max(values) > 0.05)
        made.append(xy(series, ChartAxis("step"), y, height=260, width=430))
    return made


def memory(record: dict[str, object]) -> str:
    """Bytes by kind over one step, with the peak named."""
    points: list[list[float]] = record["points"]  # type: ignore[assignment]
    names: list[str] = record["kinds"]  # type: ignore[assignment]
    places: list[str] = record["places"]  # type: ignore[assignment]
    times = [point[0] * 1e3 for point in points]
    total = [sum(point[1:]) / 2**20 for point in points]
    series, below = [], [0.0] * len(points)
    for index, name in enumerate(names):
        below = [b + point[1 + index] / 2**20 for b, point in zip(below, points, strict=True)]
        colour = COLOURS[index % len(COLOURS)]
        notes = [
            f"{place}: {name} {point[1 + index] / 2**20:,.1f} MiB" for place, point in zip(places, points, strict=True)
        ]
        label = f"{name}{' on top of it' if index else ''}"
        series.append(Series(times, below, label, colour, width=2, marks=True, size=2.5, notes=notes))
    peak = max(range(len(total)), key=total.__getitem__)
    mark = Mark(times[peak], f"peak {total[peak]:,.0f} MiB: {places[peak]}", COLOURS[1], dash=True)
    across, mib = (
        ChartAxis("ms of a step in which memory was looked at"),
        ChartAxis("MiB", low=0, high=1.12 * max(total)),
    )
    return xy(series, across, mib, marks=[mark], height=320)
