"""Draws ``docs/img/compression.svg``, the table of ``benchmarks/compression.py``: what each method leaves of a model's
bytes and of the time of a forward, and by how much its loss grows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.wire_chart import text

ROOT = Path(__file__).parents[1]
RECORDS, CHART = ROOT / "benchmarks/results/compression.jsonl", ROOT / "docs/img/compression.svg"
LEFT, TOP, HIGH, WIDTH, GAP = 320, 58, 18, 120, 62
LEAST, MOST = 1e-4, 0.1  # of the loss, on a logarithmic axis
COLOURS = {
    "trained": "#444444",
    "rounded": "#999999",
    "qat": "#1b9e77",
    "llm-compressor": "#7570b3",
    "torchao": "#e6ab02",
}
OURS = "#d95f02"  # compression_training


def colour(name: str) -> str:
    return next((each for start, each in COLOURS.items() if name.startswith(start)), OURS)


def bar(column: int, row: int, share: float, shown: str, fill: str) -> list[str]:
    """A bar of ``share`` of a column's width, and its number behind it."""
    x, y = LEFT + column * (WIDTH + GAP), TOP + row * HIGH
    wide = max(1.0, WIDTH * min(share, 1.0))
    return [
        f'<rect x="{x}" y="{y}" width="{wide:.1f}" height="{HIGH - 6}" fill="{fill}"/>',
        text(x + wide + 5, y + 10, shown),
    ]


def bars(row: int, record: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """A line of the table; ``first`` is the model that is not compressed."""
    fill, grown = colour(record["name"]), record["loss"] / first["loss"] - 1
    lines = [text(LEFT - 10, TOP + row * HIGH + 10, record["name"], "end")]
    if "bytes" in record:
        lines += bar(0, row, record["bytes"] / first["bytes"], f"{record['bytes'] / 1e6:.2f}", fill)
    share = math.log(max(grown, LEAST) / LEAST) / math.log(MOST / LEAST)
    lines += bar(1, row, share, f"{100 * grown:.2f} %", fill)
    if "x time" in record:
        lines += bar(2, row, record["x time"], f"{record['x time']:.2f}", fill)
    return lines


def main() -> None:
    records = json.loads(RECORDS.read_text("utf-8").splitlines()[-1])["records"]
    first, *others = records
    heads = ("MB", "more loss (logarithmic)", "time of a forward")
    lines = [text(16, 24, "A Llama of 1.1 M parameters, each method for 150 steps (CPU, 2 cores)")]
    lines += [text(LEFT + n * (WIDTH + GAP), TOP - 10, head) for n, head in enumerate(heads)]
    for row, record in enumerate([first, *others]):
        lines += bars(row, record, first)
    wide, tall = LEFT + 3 * (WIDTH + GAP), TOP + HIGH * len(records) + 12
    size = f'viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    style = "<style>text { font: 12px sans-serif; fill: #666 }</style>"
    CHART.write_text("\n".join([head, style, *lines, "</svg>\n"]), "utf-8")


if __name__ == "__main__":
    main()
