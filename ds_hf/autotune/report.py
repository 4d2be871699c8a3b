"""``report.html``: one small file that opens without a network.

The result in a line, its figures, the command, what changed and why, both files side by side, and charts: throughput
over micro-batch by setting, predicted against measured, the importance of the keys, where the time of a step goes, and
the launches. Then all trials, and the keys that were kept with what frees them.
"""

from __future__ import annotations

import json
import shlex
import statistics
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import optuna

from ds_hf.autotune.charts import COLOURS, Bar, ChartAxis, Series, bars, xy
from ds_hf.autotune.lengths import length_section
from ds_hf.autotune.options import Metric, gib
from ds_hf.autotune.page import code, facts, notice, page, section, side_by_side, table
from ds_hf.autotune.pareto import pareto_section
from ds_hf.autotune.records import Record, value_of
from ds_hf.autotune.result import Result
from ds_hf.autotune.space import config_of, freed_by
from ds_hf.autotune.summary import headline, summary_lines, warnings_of
from ds_hf.autotune.view import show_value
from ds_hf.regular_files import replace_file

if TYPE_CHECKING:
    from ds_hf.autotune.study import Search

__all__ = ["report_html", "write_report"]

FEWEST = 3  # measured settings that say something about their keys
KINDS = {
    "ok": "#1a7f37",
    "oom": "#bf8700",
    "pruned": "#7a8794",
    "hang": "#b03060",
    "timeout": "#b03060",
    "crash": "#c0392b",
}
HALF = 430  # width of one of two charts beside each other


def write_report(search: Search, result: Result, more: Sequence[str] = ()) -> Path:
    """Write the report beside the other results.

    Args:
        more: further sections, as HTML (the learning rate's).
    """
    path = search.options.results_dir / "report.html"
    replace_file(path, report_html(search, result, more))
    return path


def report_html(search: Search, result: Result, more: Sequence[str] = ()) -> str:
    """The whole page."""
    records = search.journal.records()
    old = config_of(search.problem.config.resolved, {})
    body = [
        _figures(search, result),
        *(notice(text) for text in warnings_of(search, result.again)),
        section("Start it with", code(shlex.join(result.words))),
        _changes(result),
        section("Both files", side_by_side(old, result.config)) if not result.kept else "",
        section("The tuned file", code(json.dumps(result.config, indent=2))) if not result.kept else "",
        *more,
        length_section(records) if search.launches.seeks_length else _throughput(search, records),
        pareto_section(records),
        _predictions(records),
        _importances(search),
        section("Where the time of a step goes", _shares(result)),
        section("The launches", _timeline(records, result), text="Each bar is one start of the script."),
        _again(result),
        _trials(search, result, records),
        _kept(search),
        section("In words", code("\n".join(summary_lines(search, result)))),
    ]
    known = search.own.events["facts"]
    about = (
        f"{known['total'] / 1e6:,.1f} M parameters ({known['trainable'] / 1e6:,.1f} M train), {known['module_dtype']}, "
        f"{known.get('processes') or known['world_size']} x {known['device']}, torch {known['torch']}"
    )
    tone = "" if result.kept else "good" if result.trusted else "warn"
    title = f"ds-hf autotune: {' '.join(search.command.script)}"
    return page(title, headline(search, result), body, about=about, tone=tone)


def _figures(search: Search, result: Result) -> str:
    metric = search.options.metric

    def shown(point: object) -> str:
        return show_value(value_of(point, metric, search.flops), metric)  # type: ignore[arg-type]

    found = {
        "your file": "does not fit" if result.own is None else shown(result.own),
        "tuned": "your file is kept" if result.kept else shown(result.best[1]),
    }
    if not result.kept and result.own is not None:
        low, high = result.interval
        unsure = f"{low:.1f} to {high:.1f} x" if result.trusted else "not confirmed"
        found["gain"] = f"{result.gain:.2f} x" if result.is_certain else unsure
    found["limited by"] = result.limit
    found["launches"] = str(len(search.launched()) + len(result.again))
    return facts(found)


def _changes(result: Result) -> str:
    if not result.changes:
        why = f" ({result.rejected})" if result.rejected else ""
        return section("Changes", text=f"None: your file stays as it is{why}.")
    rows = [(f"`{each.key}`", str(each.before), str(each.after), each.reason) for each in result.changes]
    return section("Changes", table(("key", "yours", "tuned", "why"), rows))


def _throughput(search: Search, records: list[Record]) -> str:
    metric = search.options.metric if search.options.metric.is_timed else Metric.THROUGHPUT
    series = []
    for index, record in enumerate(record for record in records if record.points):
        points = sorted(record.points, key=lambda point: point.micro)
        values = [value_of(p, metric, search.flops) for p in points]
        ends = [sorted(v * (s / p.seconds if metric is Metric.LATENCY else p.seconds / s) for s in (p.low, p.high))
                for v, p in zip(values, points, strict=True)]  # fmt: skip
        series.append(
            Series(
                [p.micro for p in points],
                values,
                record.label + (" (yours)" if record.own else ""),
                COLOURS[index % len(COLOURS)],
                marks=True,
                width=3 if record.own else 1.5,
                low=[each[0] for each in ends],
                high=[each[1] for each in ends],
                notes=[f"{record.label}, micro-batch {p.micro}: {v:,.3g} {metric.unit}, {p.seconds * 1e3:,.1f} ms"
                       for p, v in zip(points, values, strict=True)],
            )
        )  # fmt: skip
    micros = sorted({point.micro for record in records for point in record.points})
    chart = xy(series, ChartAxis("micro-batch", log=True, ticks=micros), ChartAxis(metric.unit, low=0))
    return section("Throughput over micro-batch", chart)


def _predictions(records: list[Record]) -> str:
    """Predicted against measured, of time and memory, each with how far off it was."""
    pairs = [(r, p, r.predicted[p.micro]) for r in records for p in r.points if p.micro in r.predicted]
    if not pairs:
        return ""
    charts, said = [], []
    for index, name, unit, scale in ((0, "seconds of a step", "s", 1.0), (1, "peak memory", "MiB", 2.0**20)):
        expected = [pair[2][index] / scale for pair in pairs]
        measured = [(pair[1].seconds if index == 0 else pair[1].peak) / scale for pair in pairs]
        notes = [f"{r.label}, micro-batch {p.micro}: predicted {a:,.3g} {unit}, measured {b:,.3g}"
                 for (r, p, _), a, b in zip(pairs, expected, measured, strict=True)]  # fmt: skip
        top = 1.05 * max(*expected, *measured)
        line = Series([0, top], [0, top], dash=True, colour="#7a8794")
        dots = Series(expected, measured, line=False, size=5, notes=notes)
        x, y = (ChartAxis(f"{word} {name}, {unit}", low=0, high=top) for word in ("predicted", "measured"))
        charts.append(xy([line, dots], x, y, height=340, width=HALF))
        off = sorted(abs(b / a - 1) for a, b in zip(expected, measured, strict=True) if a)
        if off:
            said.append(f"{name}: {off[len(off) // 2]:.1%} off as a rule, {off[-1]:.0%} at most")
    both = '<div class="beside">' + "".join(f"<div>{each}</div>" for each in charts) + "</div>"
    text = f"What the cost model expected before each launch. {'; '.join(said)}."
    return section("Predicted and measured", both, text=text)


def _shares(result: Result) -> str:
    parts, start = [], 0.0
    for index, (kind, share) in enumerate(sorted(result.limits.items(), key=lambda item: -item[1])):
        text = f"{kind} {share:.0%}"
        parts.append(Bar("a step", start, start + share, COLOURS[index % len(COLOURS)], text, text))
        start += share
    words = ", ".join(bar.text for bar in parts)
    return bars(parts, ChartAxis(words, low=0, high=1, percent=True))


def _again(result: Result) -> str:
    """What the launches after the search measured, each at the speed of the machine in the first one."""
    if not result.again:
        return ""
    rows = []
    for each in result.again:
        point = each.outcome.points[0] if each.outcome.points else None
        steps = each.outcome.natural
        rows.append(
            (
                str(each.turn),
                each.label,
                f"{point.micro} x {point.accumulation}" if point else "",
                f"{point.seconds * 1e3:,.1f} ±{(point.high - point.low) / 2 / point.seconds:.0%}" if point else "",
                f"{statistics.median(steps) * 1e3:,.1f}" if steps else "",
                f"{1 / point.slowdown:.2f} x" if point else "",
                each.outcome.reason,
            )
        )
    head = ("turn", "setting", "micro x acc.", "engine, ms/step", "script, ms/step", "machine", "")
    text = "The two best and your file once more, in turns: what is said of them rests on all launches together."
    return section("Started again", table(head, rows, numbers=(0, 2, 3, 4, 5)), text=text)


def _timeline(records: list[Record], result: Result) -> str:
    launched = [record for record in records if record.seconds]
    start = min((record.started for record in launched), default=0.0)
    rows = [Bar(f"{r.number}: {r.label}", r.started - start, r.started - start + r.seconds,
                KINDS.get(r.kind, "#c0392b"), r.kind, r.reason or f"{r.kind}, {r.seconds:.0f} s")
            for r in launched]  # fmt: skip
    rows += [
        Bar(f"again {each.turn}: {each.label}", at, at + each.outcome.seconds, COLOURS[0], each.outcome.kind)
        for each in result.again
        for at in (each.started - start,)
    ]
    return bars(rows, ChartAxis("seconds since the start", low=0))


def _importances(search: Search) -> str:
    found = importances(search)
    if not found:
        return ""
    rows = [Bar(name, 0, share, text=f"{share:.0%}") for name, share in found.items()]
    count = len([record for record in search.launched() if record.points])
    text = f"How much of the difference between {count} measured settings each key explains (Optuna's PED-ANOVA)."
    return section("Importance of the keys", bars(rows, ChartAxis(low=0, high=1, percent=True)), text=text)


def importances(search: Search) -> Mapping[str, float]:
    """Of the keys that were varied, in shares; nothing where too few trials differ."""
    settings = [record.setting for record in search.launched() if record.points]
    varied = {name for setting in settings for name, value in setting.items() if value != settings[0].get(name)}
    if len(settings) < FEWEST:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
            found = optuna.importance.get_param_importances(search.journal.study, evaluator=evaluator)
    except (ValueError, RuntimeError):
        return {}
    kept = {name: value for name, value in found.items() if name in varied and value > 0}
    total = sum(kept.values())
    return {name: value / total for name, value in sorted(kept.items(), key=lambda item: -item[1])}


def _trials(search: Search, result: Result, records: list[Record]) -> str:
    rows = []
    metric = search.options.metric
    for record in records:
        best = record.best(metric)
        cells = ["", "", "", ""]
        if best is not None:
            value = value_of(best, metric, search.flops)
            reach = f" ±{(best.high - best.low) / 2 / best.seconds:.0%}" if metric.is_timed else ""
            machine = "" if best.slowdown == 1 else f"{1 / best.slowdown:.2f} x"
            cells = [f"{best.micro} x {best.accumulation}", show_value(value, metric) + reach, machine, gib(best.peak)]
        label = record.label + (" (yours)" if record.own else "")
        rows.append((str(record.number), label, *cells, record.kind, record.reason))
    head = ("#", "setting", "micro x acc.", metric.value, "machine", "memory", "outcome", "reason")
    best_row = next((index for index, r in enumerate(records) if r.number == result.best[0].number), -1)
    text = "Values are at the speed that the machine had in the first launch; where its own was another, it is given."
    return section("All trials", table(head, rows, numbers=(2, 3, 4, 5), best=best_row), text=text)


def _kept(search: Search) -> str:
    if not search.space.kept:
        return ""
    ways = {name: freed_by(name, why) for name, why in search.space.kept.items()}
    rows = [(f"`{name}`", why, f"`{ways[name]}`") for name, why in search.space.kept.items() if ways[name]]
    others = [(f"`{name}`", why) for name, why in search.space.kept.items() if not ways[name]]
    inner = table(("key", "why", "to free it"), rows) if rows else ""
    if others:
        count = f"{len(others)} key{'s' * (len(others) > 1)} without effect here"
        inner += f"<details><summary>{count}</summary>{table(('key', 'why'), others)}</details>"
    text = "What the search did not touch, and the option that lets it."
    return section("Keys that were kept", inner, text=text)
