"""Charts as SVG text for the reports: lines with intervals over linear or logarithmic axes, and horizontal bars.

A chart is a string that stands in the page and takes its colours from the page's style (``page.STYLE``), so it follows
a dark theme, prints, and shows what a mark is when the pointer rests on it. plotly's script alone is 4.8 MB; its
smaller bundles are on npm only, and nothing of a report needs zooming.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["COLOURS", "LETTER", "Band", "Bar", "ChartAxis", "Mark", "Series", "bars", "xy"]

COLOURS = ("#2f6db5", "#c2571a", "#1a7f37", "#8250df", "#b03060", "#00798c", "#9a6700", "#57606a")
WIDTH = 860
LEFT, RIGHT, TOP, BOTTOM = 70, 18, 14, 46
LETTER = 7.0  # width of a letter of the charts' text, on average
LINE = 20  # height of a line of the legend


@dataclass(frozen=True)
class ChartAxis:
    """One axis; ``low`` and ``high`` are taken from the values where they are ``None``.

    Attributes:
        ticks: where labels stand; empty for round values.
        percent: labels are shares.
    """

    title: str = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] = ()
    percent: bool = False


@dataclass(frozen=True)
class Series:
    """Points in the order of drawing; a ``y`` of ``None`` or one that is not finite is a gap.

    Attributes:
        name: in the legend; empty: not there.
        low, high: ends of each value's interval.
        notes: shown when the pointer rests on a mark.
        shapes: of each mark, "o" or "x".
    """

    x: Sequence[float]
    y: Sequence[float | None]
    name: str = ""
    colour: str = COLOURS[0]
    line: bool = True
    marks: bool = False
    width: float = 1.5
    size: float = 4.0
    dash: bool = False
    opacity: float = 1.0
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    notes: Sequence[str] = ()
    shapes: Sequence[str] = ()


@dataclass(frozen=True)
class Mark:
    """A labelled vertical line at ``x``."""

    x: float
    label: str = ""
    colour: str = COLOURS[0]
    dash: bool = False


@dataclass(frozen=True)
class Band:
    """A shaded interval of the x axis."""

    low: float
    high: float
    colour: str = COLOURS[2]


@dataclass(frozen=True)
class Bar:
    """From ``start`` to ``end`` in the row ``label``; bars of one label share a row."""

    label: str
    start: float
    end: float
    colour: str = COLOURS[0]
    text: str = ""
    note: str = ""


_LEAST, _MOST = 1e-250, 1e250  # what is further away is drawn here, so that ticks around it are still numbers


class _Scale:
    """Values of an axis to places in the picture."""

    def __init__(self, axis: ChartAxis, values: Sequence[float], start: float, end: float) -> None:
        known = [value for value in values if math.isfinite(value) and (value > 0 or not axis.log)]
        low = axis.low if axis.low is not None else min(known, default=0.1 if axis.log else 0.0)
        high = axis.high if axis.high is not None else max(known, default=1.0)
        self.log, self.start, self.end = axis.log, start, end
        a, b = self._of(low), self._of(high)
        room = (b - a) * 0.04 or (0.1 if axis.log else abs(a) * 0.05 or 1.0)
        self.low = a if axis.low is not None else a - room
        self.high = b if axis.high is not None else b + room
        self.ticks = list(axis.ticks) or self._ticks()
        self.percent = axis.percent

    def _of(self, value: float) -> float:
        value = min(max(value, _LEAST if self.log else -_MOST), _MOST)
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self.low) / (self.high - self.low or 1.0)
        return self.start + min(max(share, -0.02), 1.02) * (self.end - self.start)

    def _ticks(self) -> list[float]:
        if not self.log:
            return _round_ticks(self.low, self.high)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        each = (1, 2, 5) if self.high - self.low < 2.2 else (1,)
        found = [m * 10.0**d for d in decades for m in each if self.low <= math.log10(m * 10.0**d) <= self.high]
        return found if len(found) > 1 else [10.0**value for value in _round_ticks(self.low, self.high)]

    def label(self, value: float) -> str:
        if self.percent:
            return f"{value:.0%}"
        if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
            digits, _, power = f"{value:.1e}".partition("e")
            return f"{digits.removesuffix('.0')}e{int(power)}"
        return f"{value:,.6g}"


def _round_ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between both."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def xy(
    series: Sequence[Series], x: ChartAxis, y: ChartAxis, *, marks: Sequence[Mark] = (), bands: Sequence[Band] = (),
    height: int = 380, width: int = WIDTH,
) -> str:  # fmt: skip
    """Lines and points over two axes, as an ``<svg>``."""
    named = [each for each in series if each.name]
    rows = _legend_rows([each.name for each in named], width - LEFT - RIGHT)
    top = TOP + LINE * len(rows)
    bottom = top + height - TOP - BOTTOM
    xs = [value for each in series for value in each.x] + [mark.x for mark in marks]
    ys = [v for each in series for v in (*each.y, *each.low, *each.high) if v is not None]
    across, up = _Scale(x, xs, LEFT, width - RIGHT), _Scale(y, ys, bottom, top)
    parts = [_legend(named, rows)]
    for band in bands:
        a, b = across(band.low), across(band.high)
        parts.append(f'<rect x="{a:.1f}" y="{top}" width="{max(1.0, b - a):.1f}" height="{bottom - top}" '
                     f'fill="{band.colour}" opacity=".12"/>')  # fmt: skip
    parts.append(_frame(across, up, x, y, top, bottom, width))
    parts += [_drawn(each, across, up) for each in series]
    parts += _labelled(marks, across, top, bottom)
    return _svg(parts, width, top + height - TOP)


def bars(rows: Sequence[Bar], x: ChartAxis, *, width: int = WIDTH) -> str:
    """Horizontal bars, the first row on top, as an ``<svg>``."""
    labels = list(dict.fromkeys(bar.label for bar in rows))
    left = min(330.0, 24 + LETTER * max((len(label) for label in labels), default=0))
    each = 26
    bottom = TOP + each * len(labels)
    across = _Scale(x, [0.0, *(bar.end for bar in rows)], left, width - RIGHT)
    parts = [_ticks_below(across, TOP, bottom), _title_below(x.title, (left + width - RIGHT) / 2, bottom)]
    for index, label in enumerate(labels):
        shown = label if LETTER * len(label) < left else label[: int(left / LETTER) - 2] + "…"
        place = TOP + each * index + each / 2
        parts.append(f'<text x="{left - 8:.0f}" y="{place + 4:.0f}" text-anchor="end">{escape(shown)}'
                     f"<title>{escape(label)}</title></text>")  # fmt: skip
    for bar in rows:
        a, b = across(bar.start), across(bar.end)
        place = TOP + each * labels.index(bar.label)
        note = escape(bar.note or bar.text or bar.label)
        parts.append(f'<rect x="{a:.1f}" y="{place + 4}" width="{max(1.5, b - a):.1f}" height="{each - 8}" rx="2" '
                     f'fill="{bar.colour}"><title>{note}</title></rect>')  # fmt: skip
        parts.append(_bar_text(bar, a, b, place + each / 2 + 4, width - RIGHT))
    return _svg(parts, width, bottom + BOTTOM)


def _bar_text(bar: Bar, a: float, b: float, y: float, end: float) -> str:
    """Inside the bar where there is room, else behind it, else nowhere."""
    needed = LETTER * len(bar.text) + 8
    if not bar.text or (needed > b - a and b + needed > end):
        return ""
    inside = needed <= b - a
    at, style = ((a + 6), ' class="inside"') if inside else (b + 5, "")
    return f'<text x="{at:.1f}" y="{y:.0f}"{style}>{escape(bar.text)}</text>'


def _svg(parts: Iterable[str], width: float, height: float) -> str:
    body = "".join(parts)
    return f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" role="img">{body}</svg>'


def _legend_rows(names: Sequence[str], room: float) -> list[list[int]]:
    """Indices of the names, row by row."""
    rows: list[list[int]] = []
    used = math.inf
    for index, name in enumerate(names):
        needed = 34 + LETTER * len(name)
        if used + needed > room:
            rows.append([])
            used = 0.0
        rows[-1].append(index)
        used += needed
    return rows


def _legend(named: Sequence[Series], rows: Sequence[Sequence[int]]) -> str:
    parts = []
    for line, row in enumerate(rows):
        at, y = float(LEFT), 12 + LINE * line
        for index in row:
            each = named[index]
            if each.line:
                parts.append(f'<path d="M{at:.0f} {y}h20" {_stroke(each)}/>')
            if each.marks or not each.line:
                parts.append(_point(at + 10, y, each, "o", ""))
            parts.append(f'<text x="{at + 25:.0f}" y="{y + 4}">{escape(each.name)}</text>')
            at += 34 + LETTER * len(each.name)
    return "".join(parts)


def _frame(across: _Scale, up: _Scale, x: ChartAxis, y: ChartAxis, top: float, bottom: float, width: float) -> str:
    parts = [_ticks_below(across, top, bottom), _title_below(x.title, (LEFT + width - RIGHT) / 2, bottom)]
    for value in up.ticks:
        place = up(value)
        parts.append(f'<path class="grid" d="M{LEFT} {place:.1f}H{width - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{place + 4:.1f}" text-anchor="end">{up.label(value)}</text>')
    middle = (top + bottom) / 2
    parts.append(f'<text x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})">'
                 f"{escape(y.title)}</text>")  # fmt: skip
    return "".join(parts)


def _ticks_below(across: _Scale, top: float, bottom: float) -> str:
    parts, reached = [], -math.inf
    for value in across.ticks:
        place, text = across(value), across.label(value)
        parts.append(f'<path class="grid" d="M{place:.1f} {top:.0f}V{bottom:.0f}"/>')
        if place - LETTER * len(text) / 2 > reached:  # labels that would touch are left out
            parts.append(f'<text x="{place:.1f}" y="{bottom + 17:.0f}" text-anchor="middle">{text}</text>')
            reached = place + LETTER * len(text) / 2
    return "".join(parts)


def _title_below(title: str, middle: float, bottom: float) -> str:
    return f'<text x="{middle:.0f}" y="{bottom + 37:.0f}" text-anchor="middle">{escape(title)}</text>'


def _stroke(each: Series) -> str:
    dash = ' stroke-dasharray="5 4"' if each.dash else ""
    opacity = f' opacity="{each.opacity:g}"' if each.opacity != 1 else ""
    return f'fill="none" stroke="{each.colour}" stroke-width="{each.width:g}" stroke-linejoin="round"{dash}{opacity}'


def _drawn(each: Series, across: _Scale, up: _Scale) -> str:
    parts, pen = [], "M"
    path: list[str] = []
    for x, y in zip(each.x, each.y, strict=True):
        if y is None or not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{across(x):.1f} {up(y):.1f}")
        pen = "L"
    if each.line and path:
        parts.append(f'<path d="{"".join(path)}" {_stroke(each)}/>')
    for x, low, high in zip(each.x, each.low, each.high, strict=False):
        at, a, b = across(x), up(low), up(high)
        parts.append(f'<path d="M{at:.1f} {a:.1f}V{b:.1f}M{at - 4:.1f} {a:.1f}h8M{at - 4:.1f} {b:.1f}h8" '
                     f'fill="none" stroke="{each.colour}"/>')  # fmt: skip
    if each.marks or not each.line:
        for index, (x, y) in enumerate(zip(each.x, each.y, strict=True)):
            if y is not None and math.isfinite(y):
                shape = each.shapes[index] if each.shapes else "o"
                note = each.notes[index] if each.notes else each.name
                parts.append(_point(across(x), up(y), each, shape, note))
    return "".join(parts)


def _point(x: float, y: float, each: Series, shape: str, note: str) -> str:
    title = f"<title>{escape(note)}</title>" if note else ""
    r = each.size
    if shape == "x":
        path = f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}"
        return f'<path d="{path}" stroke="{each.colour}" stroke-width="2" fill="none">{title}</path>'
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:g}" fill="{each.colour}" opacity="{each.opacity:g}">{title}</circle>'
    )


def _labelled(marks: Sequence[Mark], across: _Scale, top: float, bottom: float) -> list[str]:
    """Vertical lines; labels of neighbours stand below one another."""
    parts, ends = [], [-math.inf] * 6
    for mark in sorted(marks, key=lambda mark: mark.x):
        at = across(mark.x)
        dash = ' stroke-dasharray="5 4"' if mark.dash else ""
        parts.append(f'<path d="M{at:.1f} {top:.0f}V{bottom:.0f}" stroke="{mark.colour}" stroke-width="1.5"{dash}/>')
        if not mark.label:
            continue
        needed = LETTER * len(mark.label) + 10
        left = at + needed > across.end  # no room on the right
        start = at - needed if left else at
        row = next((index for index, end in enumerate(ends) if end <= start), len(ends) - 1)
        ends[row] = start + needed
        anchor, place = ("end", at - 5) if left else ("start", at + 5)
        parts.append(f'<text x="{place:.1f}" y="{top + 14 + 16 * row:.0f}" text-anchor="{anchor}" class="mark" '
                     f'fill="{mark.colour}">{escape(mark.label)}</text>')  # fmt: skip
    return parts
