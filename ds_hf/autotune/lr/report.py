"""The page of a search: what to train with, why, how to write it down, and the curves behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape

import numpy as np

from ds_hf.autotune.charts import COLOURS, Band, ChartAxis, Mark, Series, xy
from ds_hf.autotune.lr.figure import ceiling
from ds_hf.autotune.page import code, facts, notice, page, section, table
from ds_hf.lr import Advice, LrResult, mean_curve

__all__ = ["closing_line", "report", "sections"]

BLUE, ORANGE, GREEN = COLOURS[:3]
GREY = COLOURS[7]
FIT_POINTS = 41


def report(result: LrResult, command: Sequence[str] = ()) -> str:
    """The whole page as HTML, which needs no network."""
    low, high = result.interval
    values = {"suggested": f"{result.lr:.3g}", "worth trying": f"{low:.2g} to {high:.2g}"}
    if result.runs:
        values["nearly as good"] = f"{result.near[0]:.2g} to {result.near[1]:.2g}"
    values["training breaks"] = f"at {result.marks.limit:.2g}" if result.marks.bounded else "nowhere in the sweep"
    took = f"{result.optimizer}; {result.updates:,} updates in {result.seconds:,.0f} s"
    body = [*map(notice, result.notes), facts(values), section("Why", f"<p>{escape(_why(result))}</p>")]
    body += sections(result)
    about = f"{took}; {' '.join(command)}" if command else took
    return page("Learning rate", headline(result), body, about=about, tone="warn" if result.notes else "good")


def sections(result: LrResult) -> list[str]:
    """What to write down, and the curves, for this page and the autotuner's."""
    made = [section("How to use it", _advice(result.advice()), text=_how(result))]
    text = "The rate grows at every update until the loss leaves."
    made.append(section("Range test", _range_test(result), text=text))
    if result.runs:
        text = "Short trainings with a warm-up and a decay, and the held-out loss at the end of each."
        made += [section("Confirming runs", _confirming(result), text=text), section("Every run", _every_run(result))]
    return made


def headline(result: LrResult) -> str:
    """The result in one line."""
    length = "" if result.total_steps is None else f" for {result.total_steps:,} updates"
    return f"Train with a learning rate of {result.lr:.3g}{length}"


def closing_line(result: LrResult, page: object) -> str:
    """What a person who reads nothing else has to know."""
    advice = next((each for each in result.advice() if each.arguments), None)
    use = f": {' '.join(advice.arguments)}" if advice else ""
    return f"{headline(result)}{use} (report: {page})"


def _why(result: LrResult) -> str:
    text = result.reason[0].upper() + result.reason[1:] + "."
    if not result.marks.bounded:
        text += " No rate of the sweep broke the training, so a higher --max-lr may find more."
    return text


def _how(result: LrResult) -> str:
    text = "One of these: arguments for a script with the Trainer, or keys for the DeepSpeed file."
    if result.total_steps is None:
        text += " With --total-steps N the numbers of steps are filled in, and there is a 1Cycle schedule."
    return text


def _advice(advice: Sequence[Advice]) -> str:
    rows = []
    for each in advice:
        note = f'<br><span class="dim">{escape(each.note)}</span>' if each.note else ""
        arguments = code(" ".join(each.arguments)) if each.arguments else ""
        config = code(",\n".join(f'"{key}": {json.dumps(value)}' for key, value in each.config.items()))
        rows.append(
            f'<tr><td>{escape(each.name)}{note}</td><td data-label="arguments of the Trainer">{arguments}</td>'
            f'<td data-label="keys of the DeepSpeed file">{config}</td></tr>'
        )
    widths = "".join(f'<col style="width: {share}%">' for share in (21, 30, 49))
    head = "<tr><th>schedule</th><th>arguments of the Trainer</th><th>keys of the DeepSpeed file</th></tr>"
    inner = f"<colgroup>{widths}</colgroup>{head}{''.join(rows)}"
    return f'<div class="wide"><table class="words">{inner}</table></div>'


def _range_test(result: LrResult) -> str:
    top = ceiling(result)
    series = []
    for index, sweep in enumerate(result.sweeps):
        name = "training, each order of the batches" if not index else ""
        series.append(Series(sweep.lrs, _below(sweep.train, top), name, GREY, width=1, opacity=0.7))
        held = "held-out, each order" if not index else ""
        series.append(Series(sweep.held_out_lrs, _below(sweep.held_out, top), held, BLUE, width=1, dash=True))
    mean = mean_curve(result.sweeps, held_out=True)
    if len(mean):
        smooth = mean.smooth()
        losses = _below([float(loss) for loss in smooth.losses], top)
        series.append(Series([float(lr) for lr in smooth.lrs], losses, "held-out, mean and smoothed", BLUE, width=3))
    marks = [Mark(result.lr, f"suggested {result.lr:.3g}", GREEN)]
    others = {"steepest": result.marks.steepest, "valley": result.marks.valley, "breaks": result.marks.limit}
    marks += [Mark(lr, f"{name} {lr:.2g}", GREY, dash=True) for name, lr in others.items() if lr is not None]
    return xy(
        series,
        ChartAxis("learning rate", log=True),
        ChartAxis("loss"),
        marks=marks,
        bands=[Band(*result.interval, GREEN)],
    )


def _confirming(result: LrResult) -> str:
    series = []
    fit = fitted(result)
    if fit is not None:
        series.append(Series(*fit, "parabola through the best and its neighbours", GREEN, width=2, dash=True))
    for steps, colour in zip(sorted({run.run.steps for run in result.runs}), (ORANGE, BLUE, GREY), strict=False):
        held = (run for run in result.runs if run.run.steps == steps and math.isfinite(run.loss))
        chosen = sorted(held, key=lambda run: run.run.lr)
        series.append(
            Series(
                [run.run.lr for run in chosen],
                [run.loss for run in chosen],
                f"{steps} updates",
                colour,
                line=False,
                marks=True,
                size=4.5,
                notes=[_note(run.run.lr, run.run.seed, run.loss) for run in chosen],
            )
        )
    marks = [Mark(result.lr, f"suggested {result.lr:.3g}", GREEN)]
    left = {run.run.lr for run in result.runs if not math.isfinite(run.loss)}
    marks += [Mark(lr, f"{lr:.2g} diverged", GREY, dash=True) for lr in sorted(left)[:1]]
    if fit is not None:
        lowest = fit[0][int(np.argmin(fit[1]))]
        if abs(math.log(lowest / result.lr)) > 0.02:
            marks.append(Mark(lowest, f"lowest of the parabola {lowest:.3g}", GREEN, dash=True))
    losses = ChartAxis("held-out loss at the end", high=_top(result))
    return xy(series, ChartAxis("learning rate", log=True), losses, marks=marks, bands=[Band(*result.near, GREEN)])


def _top(result: LrResult) -> float | None:
    """What is far worse stands at the upper edge, so that the runs that decide are not drawn on one line."""
    finite = [run for run in result.runs if math.isfinite(run.loss)]
    longest = max((run.run.steps for run in finite), default=0)
    deciding = [run.loss for run in finite if run.run.steps == longest]
    if len(deciding) < 3 or max(deciding) == min(deciding):
        return None
    top = 2 * max(deciding) - min(deciding)
    return top if max(run.loss for run in finite) > top else None


def _note(lr: float, seed: int, loss: float) -> str:
    return f"{lr:.3g}, order {seed}: " + (f"{loss:.4f}" if math.isfinite(loss) else "diverged")


def fitted(result: LrResult) -> tuple[list[float], list[float]] | None:
    """The parabola that chose the rate, over the logarithm of the rate; ``None`` where the best run stood at an end."""
    means = _means(result)
    for steps in sorted({steps for steps, _ in means}, reverse=True):
        losses = {lr: loss for (length, lr), loss in means.items() if length == steps}
        if not any(map(math.isfinite, losses.values())):
            continue
        rates = sorted(losses)
        at = rates.index(min(rates, key=lambda lr: losses[lr]))
        around = rates[max(at - 1, 0) : at + 2]
        if len(around) < 3 or not all(math.isfinite(losses[lr]) for lr in around):
            return None
        logs = np.log10(around)
        curve = np.polyfit(logs, [losses[lr] for lr in around], 2)
        if curve[0] <= 0:
            return None
        at_these = np.linspace(logs[0], logs[-1], FIT_POINTS)
        return [float(10**x) for x in at_these], [float(y) for y in np.polyval(curve, at_these)]
    return None


def _means(result: LrResult) -> dict[tuple[int, float], float]:
    found: dict[tuple[int, float], list[float]] = {}
    for run in result.runs:
        found.setdefault((run.run.steps, run.run.lr), []).append(run.loss)
    return {key: sum(losses) / len(losses) for key, losses in found.items()}


def _every_run(result: LrResult) -> str:
    means = sorted(_means(result).items())
    counts = {key: sum((run.run.steps, run.run.lr) == key for run in result.runs) for key, _ in means}
    longest = max(steps for (steps, _), _ in means)
    best = min((index for index, ((steps, _), _) in enumerate(means) if steps == longest),
               key=lambda index: means[index][1])  # fmt: skip
    rows = [
        [f"{lr:.3g}", f"{steps:,}", str(counts[steps, lr]), f"{loss:.4f}" if math.isfinite(loss) else "diverged"]
        for (steps, lr), loss in means
    ]
    head = ["learning rate", "updates", "orders", "held-out loss, mean"]
    return table(head, rows, numbers=(0, 1, 2, 3), best=best if math.isfinite(means[best][1]) else -1)


def _below(losses: Sequence[float], top: float) -> list[float | None]:
    return [loss if math.isfinite(loss) and loss <= top else None for loss in losses]
