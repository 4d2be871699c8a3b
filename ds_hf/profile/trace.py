"""The recorded steps as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ds_hf.profile.analysis import Analysis
from ds_hf.profile.verdict import NAMES

__all__ = ["write_trace"]

MOST_STEPS = 8


def write_trace(analysis: Analysis, path: Path) -> None:
    """Write the last steps that every rank recorded: a process a rank, a thread for the computation and one for
    communication streams. Times are microseconds on the ranks' clocks."""
    events: list[dict[str, Any]] = []
    ranks = analysis.run.ranks
    numbers = analysis.steps[-MOST_STEPS:]
    start = min((rank.steps[number].begin for rank in ranks for number in numbers), default=0.0)
    for rank in ranks:
        about = f"rank {rank.number} on {rank.header['host']}"
        events.append({"ph": "M", "name": "process_name", "pid": rank.number, "tid": 0, "args": {"name": about}})
        for tid, name in ((0, "computation"), (1, "communication streams")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank.number, "tid": tid, "args": {"name": name}})
        for number in numbers:
            step = rank.steps[number]
            base = (step.begin - start) * 1e6
            events.append(_span(f"step {number}", "step", rank.number, 0, base, step.seconds, {}))
            for tid, spans in ((0, step.spans), (1, step.beside)):
                for span in spans:
                    key = rank.keys[span.key]
                    name = f"{key.operation} of {key.place}" if key.operation else key.place
                    more = {"kind": NAMES[key.kind], "bytes": key.nbytes}
                    at = base + span.start * 1e6
                    events.append(_span(name, key.kind, rank.number, tid, at, span.seconds, more))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")), "utf-8")


def _span(
    name: str, kind: str, rank: int, thread: int, at: float, seconds: float, more: dict[str, Any]
) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread, "ts": round(at, 1),
            "dur": round(seconds * 1e6, 1), "args": more}  # fmt: skip
