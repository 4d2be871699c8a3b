"""The recorded steps as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
import math
from typing import Any

from ds_hf.profile.analysis import Analysis
from ds_hf.profile.verdict import NAMES

__all__ = ["trace_text"]

MOST_STEPS = 8
ROUNDING = 0.2  # microseconds


def trace_text(analysis: Analysis) -> str:
    """The last steps that every rank recorded: a process a rank, a thread for the computation and one for
    communication streams. Times are microseconds on the ranks' clocks."""
    events: list[dict[str, Any]] = []
    ranks = analysis.run.ranks
    numbers = analysis.steps[-MOST_STEPS:]
    start = min((rank.steps[number].begin for rank in ranks for number in numbers), default=0.0)
    for rank in ranks:
        about = f"rank {rank.number} on {rank.header['host']}"
        events.append({"ph": "M", "name": "process_name", "pid": rank.number, "tid": 0, "args": {"name": about}})
        beside = any(rank.steps[number].beside for number in numbers)
        for tid, name in ((0, "computation"), (1, "communication streams"))[: 1 + beside]:
            events.append({"ph": "M", "name": "thread_name", "pid": rank.number, "tid": tid, "args": {"name": name}})
        end = 0.0
        for number in numbers:
            step = rank.steps[number]
            own = len(events)
            base = (step.begin - start) * 1e6
            events.append(_span(f"step {number}", "step", rank.number, 0, base, step.seconds, {}))
            for tid, spans in ((0, step.spans), (1, step.beside)):
                if tid:
                    end = _nest(events[own:], end, math.inf)
                for span in spans:
                    key = rank.keys[span.key]
                    name = f"{key.operation} of {key.place}" if key.operation else key.place
                    more = {"kind": NAMES[key.kind], "bytes": key.nbytes}
                    at = base + span.start * 1e6
                    events.append(_span(name, key.kind, rank.number, tid, at, span.seconds, more))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _nest(events: list[dict[str, Any]], first: float, last: float) -> float:
    """Make the spans of a step lie inside or beside each other and between two times, which rounding undoes: viewers
    draw what overlaps wrongly. Returns where the step ends."""
    step, *spans = events
    first = max(first, step["ts"])
    open_ = [last]  # ends of the spans that hold the present one, the innermost last
    for event in [step, *sorted(spans, key=lambda event: (event["ts"], -event["dur"]))]:
        end = event["ts"] + event["dur"]
        begin = max(event["ts"], first)
        while len(open_) > 2 and open_[-1] <= begin + ROUNDING:  # the step itself stays open
            begin = max(begin, open_.pop())
        end = max(begin, min(end, open_[-1]))
        event["ts"], event["dur"] = round(begin, 1), round(end - begin, 1)
        open_.append(end)
    return float(step["ts"] + step["dur"])


def _span(
    name: str, kind: str, rank: int, thread: int, at: float, seconds: float, more: dict[str, Any]
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "ts": round(at, 1),
            "dur": round(seconds * 1e6, 1), "args": more}  # fmt: skip
