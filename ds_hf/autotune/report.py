"""``report.html``: one file, with plotly inside, that opens without a network.

Plots: throughput over micro-batch by setting, predicted against measured memory and time, the timeline of launches, the
importances of the keys, and where the time of a step goes. Tables: the result with its reasons, and all trials.
"""

from __future__ import annotations

import html
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ds_hf.autotune.options import Metric, gib
from ds_hf.autotune.records import Record, records_of, value_of
from ds_hf.autotune.result import Result, summary_lines
from ds_hf.autotune.view import show_value

if TYPE_CHECKING:
    from ds_hf.autotune.study import Search

__all__ = ["report_html", "write_report"]

FEWEST = 3  # measured settings that say something about their keys
COLOURS = {
    "ok": "#2a9d5c",
    "oom": "#e0a030",
    "pruned": "#9aa5b1",
    "hang": "#b03060",
    "timeout": "#b03060",
    "crash": "#c0392b",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; color: #1f2933; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top;
border-bottom: 1px solid #d8dee4; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { background: #f2f4f7; padding: .1rem .3rem; border-radius: 3px; }
pre { padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.figure { display: flex; gap: 2.5rem; flex-wrap: wrap; margin: 1rem 0; } .figure div { min-width: 9rem; }
.figure b { display: block; font-size: 1.5rem; } .dim { color: #66717d; } tr.best td { background: #eaf6ef; }
"""


def write_report(search: Search, result: Result, figures: Sequence[tuple[str, go.Figure]] = ()) -> Path:
    """Write the report beside the other results.

    Args:
        figures: more plots with their titles (the learning rate's).
    """
    path = search.options.results_dir / "report.html"
    path.write_text(report_html(search, result, figures), "utf-8")
    return path


def report_html(search: Search, result: Result, figures: Sequence[tuple[str, go.Figure]] = ()) -> str:
    """The whole page."""
    records = records_of(search.study)
    sections = [
        ("Throughput over micro-batch", _throughput(search, records)),
        ("Predicted and measured", _predictions(records)),
        ("Where the time of a step goes", _shares(result)),
        ("Timeline of launches", _timeline(records)),
        ("Importance of the keys", _importances(search)),
        *figures,
    ]
    body = [_head(search, result), _changes(result)]
    for title, figure in sections:
        if figure is not None:
            body.append(f"<h2>{html.escape(title)}</h2>{_div(figure)}")
    body.append(_trials(search, result, records))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ds-hf autotune</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(body)}</body></html>"
    )


def _div(figure: go.Figure) -> str:
    figure.update_layout(template="plotly_white", margin={"l": 60, "r": 20, "t": 20, "b": 50}, font={"size": 13})
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False}))


def _head(search: Search, result: Result) -> str:
    metric = search.options.metric
    facts = search.own.events["facts"]
    value = show_value(value_of(result.best[1], metric, search.world_size, search.flops), metric)
    own = (
        "does not fit"
        if result.own is None
        else show_value(value_of(result.own, metric, search.world_size, search.flops), metric)
    )
    gain = "no significant gain" if result.kept else f"{result.gain:.2f} x"
    figures = [("your file", own), ("tuned", value), ("gain", gain), ("limited by", result.limit)]
    shown = "".join(f"<div><span class=dim>{html.escape(n)}</span><b>{html.escape(v)}</b></div>" for n, v in figures)
    lines = html.escape("\n".join(summary_lines(search, result)))
    about = (
        f"{facts['total'] / 1e6:,.1f} M parameters ({facts['trainable'] / 1e6:,.1f} M train), {facts['module_dtype']}, "
        f"{facts['world_size']} x {facts['device']}, torch {facts['torch']}"
    )
    return (
        f"<h1>ds-hf autotune: {html.escape(' '.join(search.command.script))}</h1><p class=dim>{html.escape(about)}</p>"
        f"<div class=figure>{shown}</div><pre>{lines}</pre>"
        f"<h2>Command</h2><pre>{html.escape(shlex.join(result.words))}</pre>"
    )


def _changes(result: Result) -> str:
    if not result.changes:
        return "<h2>Changes</h2><p>None: your file stays as it is.</p>"
    rows = "".join(
        f"<tr><td><code>{html.escape(c.key)}</code></td><td>{html.escape(str(c.before))}</td>"
        f"<td><b>{html.escape(str(c.after))}</b></td><td>{html.escape(c.reason)}</td></tr>"
        for c in result.changes
    )
    return f"<h2>Changes</h2><table><tr><th>key</th><th>yours</th><th>tuned</th><th>why</th></tr>{rows}</table>"


def _throughput(search: Search, records: list[Record]) -> go.Figure:
    figure = go.Figure()
    metric = search.options.metric
    shown = metric if metric is not Metric.MEMORY else Metric.THROUGHPUT
    for record in records:
        points = sorted(record.points, key=lambda point: point.micro)
        if not points:
            continue
        values = [value_of(p, shown, search.world_size, search.flops) for p in points]
        ends = [sorted(v * p.seconds / s for s in (p.low, p.high)) for v, p in zip(values, points, strict=True)]
        if not shown.maximize:
            ends = [[p.low, p.high] for p in points]
        figure.add_trace(
            go.Scatter(
                x=[p.micro for p in points],
                y=values,
                mode="lines+markers",
                name=record.label + (" (yours)" if record.own else ""),
                line={"width": 3 if record.own else 1.5},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [e[1] - v for e, v in zip(ends, values, strict=True)],
                    "arrayminus": [v - e[0] for e, v in zip(ends, values, strict=True)],
                    "thickness": 1,
                },
            )
        )
    figure.update_xaxes(title="micro-batch", type="log", tickvals=sorted({p.micro for r in records for p in r.points}))
    figure.update_yaxes(title=shown.unit, rangemode="tozero")
    figure.update_layout(height=460)
    return figure


def _predictions(records: list[Record]) -> go.Figure | None:
    from plotly.subplots import make_subplots

    pairs = [(r, p, r.predicted[p.micro]) for r in records for p in r.points if p.micro in r.predicted]
    if not pairs:
        return None
    figure = make_subplots(rows=1, cols=2, subplot_titles=("seconds of a step", "peak memory, GiB"))
    for column, index, scale in ((1, 0, 1.0), (2, 1, 2.0**30)):
        expected = [pair[2][index] / scale for pair in pairs]
        measured = [(pair[1].seconds if index == 0 else pair[1].peak) / scale for pair in pairs]
        texts = [f"{record.label}, micro-batch {point.micro}" for record, point, _ in pairs]
        figure.add_trace(
            go.Scatter(
                x=expected,
                y=measured,
                mode="markers",
                text=texts,
                showlegend=False,
                marker={"size": 9, "color": "#2f6db5"},
            ),
            row=1,
            col=column,
        )
        top = 1.05 * max(*expected, *measured)
        figure.add_trace(
            go.Scatter(
                x=[0, top],
                y=[0, top],
                mode="lines",
                showlegend=False,
                hoverinfo="skip",
                line={"dash": "dot", "color": "#9aa5b1"},
            ),
            row=1,
            col=column,
        )
    figure.update_xaxes(title="predicted before the launch")
    figure.update_yaxes(title="measured")
    figure.update_layout(height=400)
    return figure


def _shares(result: Result) -> go.Figure:
    figure = go.Figure()
    for kind, share in sorted(result.limits.items(), key=lambda item: -item[1]):
        figure.add_trace(go.Bar(y=["best setting"], x=[share], name=f"{kind} {share:.0%}", orientation="h"))
    figure.update_layout(barmode="stack", height=190, xaxis={"tickformat": ".0%", "range": [0, 1]})
    return figure


def _timeline(records: list[Record]) -> go.Figure:
    launched = [record for record in records if record.seconds]
    start = min((record.started for record in launched), default=0.0)
    figure = go.Figure(
        go.Bar(
            y=[f"{r.number}: {r.label}" for r in launched],
            x=[r.seconds for r in launched],
            base=[r.started - start for r in launched],
            orientation="h",
            marker={"color": [COLOURS.get(r.kind, "#c0392b") for r in launched]},
            text=[r.kind for r in launched],
            hovertext=[r.reason or r.kind for r in launched],
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="seconds since the start")
    figure.update_layout(height=120 + 28 * len(launched))
    return figure


def _importances(search: Search) -> go.Figure | None:
    """Optuna's PED-ANOVA of the keys that were varied; nothing where too few trials differ."""
    settings = [record.setting for record in search.launched() if record.points]
    varied = {name for setting in settings for name, value in setting.items() if value != settings[0].get(name)}
    if len(settings) < FEWEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = optuna.importance.get_param_importances(
                search.study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
            )
    except (ValueError, RuntimeError):
        return None
    found = {name: value for name, value in found.items() if name in varied}
    if not any(found.values()):
        return None
    figure = go.Figure(go.Bar(x=list(found.values()), y=list(found), orientation="h", marker={"color": "#2f6db5"}))
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=120 + 32 * len(found))
    return figure


def _trials(search: Search, result: Result, records: list[Record]) -> str:
    rows = []
    for record in records:
        best = record.best(search.options.metric, search.world_size)
        mark = " class=best" if record is result.best[0] or record.number == result.best[0].number else ""
        cells: list[str] = [str(record.number), html.escape(record.label + (" (yours)" if record.own else ""))]
        if best is None:
            cells += ["", "", ""]
        else:
            value = value_of(best, search.options.metric, search.world_size, search.flops)
            cells += [f"{best.micro} x {best.accumulation}", show_value(value, search.options.metric), gib(best.peak)]
        cells += [record.kind, html.escape(record.reason)]
        rows.append(f"<tr{mark}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(
        f"<th>{name}</th>"
        for name in ("#", "setting", "micro x acc.", search.options.metric.value, "memory", "outcome", "reason")
    )
    kept = "".join(f"<li><code>{html.escape(k)}</code>: {html.escape(v)}</li>" for k, v in search.space.kept.items())
    return (
        f"<h2>All trials</h2><table><tr>{head}</tr>{''.join(rows)}</table><h2>Keys that were kept</h2><ul>{kept}</ul>"
    )
