"""Draws ``docs/img/wire.svg``, and prints a table, from ``benchmarks/results/wire-convergence.jsonl``."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDS, CHART = ROOT / "benchmarks/results/wire-convergence.jsonl", ROOT / "docs/img/wire.svg"
COLOURS = {
    "Adam": "#444444",
    "8-bit weights and gradients": "#1b9e77",
    "1-bit Adam": "#d95f02",
    "0/1 Adam": "#e7298a",
    "LAMB": "#999999",
    "1-bit LAMB": "#7570b3",
    "torch DDP, bf16 hook": "#66a61e",
    "torch DDP, powerSGD rank 2": "#e6ab02",
}
LEFT, TOP, WIDTH, HEIGHT = 60, 40, 460, 300
SMALLEST, LARGEST, LOW, HIGH = 1.0, 400.0, 2.0, 5.0  # MB, loss


def place(megabytes: float, loss: float) -> str:
    """A point of the picture."""
    x = LEFT + WIDTH * math.log(max(megabytes, SMALLEST) / SMALLEST) / math.log(LARGEST / SMALLEST)
    y = TOP + HEIGHT * (HIGH - min(max(loss, LOW), HIGH)) / (HIGH - LOW)
    return f"{x:.1f},{y:.1f}"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """A line of text."""
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'


def axes() -> list[str]:
    """Lines and numbers."""
    lines = []
    for loss in (2, 3, 4, 5):
        (x, y), (end, _) = (place(at, loss).split(",") for at in (SMALLEST, LARGEST))
        lines.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#888" stroke-opacity="0.3"/>')
        lines.append(text(LEFT - 8, float(y) + 4, str(loss), "end"))
    for megabytes in (1, 10, 100, 400):
        x, _ = place(megabytes, LOW).split(",")
        lines.append(text(float(x), TOP + HEIGHT + 18, str(megabytes), "middle"))
    lines.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 38, "MB sent by two processes", "middle"))
    return [*lines, text(LEFT, 22, "Training loss over bytes, 300 steps, mean of the seeds")]


def main() -> None:
    latest = {(row["run"], row["seed"]): row for row in map(json.loads, RECORDS.read_text().splitlines())}
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (name, _), row in sorted(latest.items(), key=lambda item: item[0][1]):
        runs[name].append(row)
    lines = axes()
    for name, rows in runs.items():
        held = [row["held_out"] for row in rows]
        known = all(row["nbytes"] for row in rows)  # not where others used the interface
        sent = f"{sum(row['nbytes'][-1] for row in rows) / len(rows) / 1e6:.0f}" if known else ""
        print(f"| {name} | {len(rows)} | {sum(held) / len(held):.3f} | {min(held):.3f} to {max(held):.3f} | {sent} |")
        if name in COLOURS:
            losses = [sum(column) / len(rows) for column in zip(*(row["losses"] for row in rows), strict=True)]
            nbytes = [sum(column) / len(rows) / 1e6 for column in zip(*(row["nbytes"] for row in rows), strict=True)]
            points = " ".join(place(*point) for point in zip(nbytes, losses, strict=True))
            lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.8"/>')
            y = TOP + 14 + 20 * list(COLOURS).index(name)
            lines.append(f'<rect x="{LEFT + WIDTH + 16}" y="{y - 9}" width="12" height="4" fill="{COLOURS[name]}"/>')
            lines.append(text(LEFT + WIDTH + 34, y - 3, name))
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 400" width="720" height="400" role="img">'
    style = "<style>text { font: 12px sans-serif; fill: #666 }</style>"
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text("\n".join([head, style, *lines, "</svg>\n"]))


if __name__ == "__main__":
    main()
