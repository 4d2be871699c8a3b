"""A result and its progress as plain text, for terminals and logs."""

from __future__ import annotations

import json
import math
from typing import Any

from ds_hf.lr import LrResult, RunResult

__all__ = ["event_line", "summary"]


def summary(result: LrResult) -> str:
    """Everything that a person needs, in lines of at most about 100 characters."""
    low, high = result.interval
    marks = result.marks
    limit = f"{marks.limit:.3g}" + ("" if marks.bounded else " (the end of the sweep: nothing broke)")
    lines = [
        f"learning rate  {result.lr:.3g}",
        f"why            {result.reason}",
        f"interval       {low:.3g} to {high:.3g} (learning begins ... training breaks)",
        f"nearly as good {result.near[0]:.3g} to {result.near[1]:.3g}",
        f"range test     steepest {_rate(marks.steepest)}, valley {_rate(marks.valley)}, limit {limit}",
        f"took           {result.updates} updates, {result.seconds:.1f} s; {result.optimizer}",
        *(f"note           {note}" for note in result.notes),
    ]
    if result.runs:
        lines += ["", "confirming runs (held-out loss at the end)", *_table(result.runs)]
    lines += ["", "as HuggingFace arguments", *_arguments(result), "", "as DeepSpeed's JSON (one of)"]
    for advice in result.advice():
        lines.append(f"  {advice.name}" + (f"  ({advice.note})" if advice.note else ""))
        lines.append("    " + json.dumps(advice.config)[1:-1])
    if result.total_steps is None:
        lines += ["", "with --total-steps N the numbers of steps are filled in, and there is a 1Cycle schedule"]
    return "\n".join(lines)


def _table(runs: tuple[RunResult, ...]) -> list[str]:
    found: dict[tuple[int, float], list[float]] = {}
    for run in runs:
        found.setdefault((run.run.steps, run.run.lr), []).append(run.loss)
    means = {key: sum(losses) / len(losses) for key, losses in found.items()}
    best = {steps: min(loss for (s, _), loss in means.items() if s == steps) for steps, _ in means}
    lines = []
    for (steps, lr), loss in sorted(means.items()):
        text = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
        star = "  <- lowest" if loss == best[steps] and math.isfinite(loss) else ""
        lines.append(f"  {lr:9.3g}  {steps:>5} updates x {len(found[steps, lr])}  {text}{star}")
    return lines


def _arguments(result: LrResult) -> list[str]:
    return list(dict.fromkeys(f"  {' '.join(advice.arguments)}" for advice in result.advice() if advice.arguments))


def _rate(lr: float | None) -> str:
    return "-" if lr is None else f"{lr:.3g}"


def event_line(event: dict[str, Any]) -> str:
    """What is happening, in a few words."""
    phase = event.get("phase")
    if phase == "record":
        return f"reading batches from the script: {event['step']} of {event['of']}"
    if phase == "feed":
        return f"the script goes on feeding batches: {event['why']}"
    if phase == "short":
        return f"starting again for a shorter search: {event['why']}"
    if phase == "plan":
        took, about = event["step_seconds"], event["updates"] * event["step_seconds"]
        shorter = ", a shorter search than asked for" if event["shorter"] else ""
        return f"an update takes {took:.2g} s: about {event['updates']} of them, {about:.0f} s{shorter}"
    if phase == "sweep":
        return f"range test, order {event['seed']}: {event['step']} of {event['of']}, lr {event['lr']:.2e}"
    loss = "diverged" if event.get("loss") is None else f"held-out loss {event['loss']:.4f}"
    return f"{event.get('steps')} updates at {event.get('lr', math.nan):.3g}: {loss}"
