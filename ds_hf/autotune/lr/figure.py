"""The curves of a search with interval and suggestion, as a plotly figure for the report and the notebook."""

from __future__ import annotations

import math
from typing import Any

from ds_hf.lr import LrResult, mean_curve

__all__ = ["ceiling", "figure"]

TRAIN, HELD_OUT, RUNS, SUGGESTED = "#7a8aa0", "#1f5fa8", "#c2571a", "#1a7f37"


def figure(result: LrResult) -> Any:
    """Two panels over one axis of learning rates: the range test, and the confirming runs below it.

    Returns:
        a ``plotly.graph_objects.Figure``.
    """
    from plotly.subplots import make_subplots

    runs = bool(result.runs)
    titles = ["Range test", "Confirming runs: held-out loss at their end"][: 1 + runs]
    made = make_subplots(rows=1 + runs, cols=1, shared_xaxes=True, vertical_spacing=0.1, subplot_titles=titles)
    _sweeps(made, result)
    if runs:
        _runs(made, result)
    low, high = result.interval
    for row in range(1, 2 + runs):
        made.add_vrect(x0=low, x1=high, fillcolor=SUGGESTED, opacity=0.08, line_width=0, row=row, col=1)
        made.add_vline(x=result.lr, line={"color": SUGGESTED, "width": 2}, row=row, col=1)
        made.update_yaxes(title_text="loss", row=row, col=1)
    made.update_xaxes(type="log", exponentformat="power")
    made.update_xaxes(title_text="learning rate", row=1 + runs, col=1)
    made.update_layout(
        title=f"Learning rate: {result.lr:.3g} suggested, {low:.2g} to {high:.2g} worth trying ({result.optimizer})",
        template="plotly_white",
        height=430 + 270 * runs,
        legend={"orientation": "h", "y": -0.12},
        margin={"t": 80},
    )
    return made


def _sweeps(made: Any, result: LrResult) -> None:
    top = ceiling(result)
    for index, sweep in enumerate(result.sweeps):
        name = f"training, order {sweep.seed}"
        losses = [_below(loss, top) for loss in sweep.train]
        line = {"color": TRAIN, "width": 1}
        made.add_scatter(x=sweep.lrs, y=losses, name=name, line=line, opacity=0.7, row=1, col=1)
        held = [_below(loss, top) for loss in sweep.held_out]
        line = {"color": HELD_OUT, "width": 1, "dash": "dot"}
        made.add_scatter(
            x=sweep.held_out_lrs, y=held, name="held-out, each order", line=line, showlegend=not index, row=1, col=1
        )
    mean = mean_curve(result.sweeps, held_out=True)
    if len(mean):
        smooth = mean.smooth()
        line = {"color": HELD_OUT, "width": 3}
        losses = [_below(float(loss), top) for loss in smooth.losses]
        made.add_scatter(x=smooth.lrs.tolist(), y=losses, name="held-out, mean and smoothed", line=line, row=1, col=1)
    marks = {"steepest": result.marks.steepest, "valley": result.marks.valley, "limit": result.marks.limit}
    for name, lr in marks.items():
        if lr is not None:
            made.add_vline(x=lr, line={"color": TRAIN, "dash": "dash", "width": 1}, row=1, col=1)
            # Annotations of a logarithmic axis are placed by the logarithm, which add_vline does not know.
            made.add_annotation(
                x=math.log10(lr), y=1, xref="x", yref="y domain", text=name, textangle=-90, showarrow=False,
                xanchor="left", yanchor="top",
            )  # fmt: skip


def _runs(made: Any, result: LrResult) -> None:
    worst = max((run.loss for run in result.runs if math.isfinite(run.loss)), default=1.0)
    for steps in sorted({run.run.steps for run in result.runs}):
        chosen = sorted((run for run in result.runs if run.run.steps == steps), key=lambda run: run.run.lr)
        losses = [run.loss if math.isfinite(run.loss) else worst for run in chosen]
        symbols = ["circle" if math.isfinite(run.loss) else "x" for run in chosen]
        notes = [f"order {run.run.seed}" + ("" if math.isfinite(run.loss) else ", diverged") for run in chosen]
        marker = {"color": RUNS, "symbol": symbols, "size": 6 + 4 * steps / max(r.run.steps for r in result.runs)}
        made.add_scatter(
            x=[run.run.lr for run in chosen], y=losses, text=notes, mode="markers", marker=marker,
            name=f"{steps} updates", row=2, col=1,
        )  # fmt: skip


def ceiling(result: LrResult) -> float:
    """Losses above it are not drawn: one that diverges would flatten all others."""
    finite = [loss for sweep in result.sweeps for loss in sweep.train if math.isfinite(loss)]
    if not finite:
        return math.inf
    first = finite[0]
    return first + 0.5 * max(first - min(finite), 0.2 * abs(first))


def _below(loss: float, top: float) -> float | None:
    return loss if math.isfinite(loss) and loss <= top else None
