"""Draws ``docs/img/step-time.svg`` from the newest records of ``benchmarks/training.py`` on two H100.

    python benchmarks/chart.py

One group of bars a setting: the step times of DeepSpeed, FSDP2 and ds_hf in one run, as shares of DeepSpeed's. The file
is plain SVG, follows the reader's light or dark theme, and needs nothing but a browser.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "training.jsonl"
CHART = ROOT / "docs" / "img" / "step-time.svg"
ENGINES = {"deepspeed": "DeepSpeed 0.19.8", "fsdp2": "FSDP2", "ds_hf": "ds_hf"}
SETTINGS = {
    "2xh100-1b3-stage1": "1.35 B, ZeRO-1",
    "2xh100-1b3-stage2": "1.35 B, ZeRO-2",
    "2xh100-1b3-stage3": "1.35 B, ZeRO-3",
    "2xh100-6b7-stage3": "6.7 B, ZeRO-3, checkpointing",
}
WIDTH, LEFT, FULL = 760, 230, 400  # of the picture, of the labels, and of a bar of 100 %
TOP, BAR, GAP = 76, 17, 22
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
  .title { font-size: 16px; font-weight: 600 } .small { font-size: 11.5px; fill: #57606a }
  .deepspeed { fill: #a3adb8 } .fsdp2 { fill: #6e8fb5 } .ds_hf { fill: #1a7f5a }
  .ds_hf-text { font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 }
    .deepspeed { fill: #6b7480 } .fsdp2 { fill: #5a83b3 } .ds_hf { fill: #2ea878 }
  }
"""


class Group(NamedTuple):
    """One setting: its label, and milliseconds a step by engine."""

    label: str
    machine: str
    torch: str
    date: str
    ms: dict[str, float]


def newest(setting: str) -> Group:
    """The newest run of ``setting`` in which all engines ran."""
    for line in reversed(RESULTS.read_text("utf-8").splitlines()):
        found: dict[str, Any] = json.loads(line)
        ms = {record["name"]: record["step_ms"] for record in found["records"] if not record["error"]}
        if found["setting"] == setting and set(ENGINES) <= set(ms):
            return Group(SETTINGS[setting], found["machine"], found["torch"], found["date"], ms)
    raise SystemExit(f"no run of {setting} in {RESULTS} has {', '.join(ENGINES)}")


def draw(groups: list[Group]) -> str:
    """The picture; bars are as long as the step took, DeepSpeed's is 100 %."""
    machines = sorted({f"{group.machine}, torch {group.torch}" for group in groups})
    dates = sorted({group.date for group in groups})
    note = f"{'; '.join(machines)}; bf16, AdamW, 2048 tokens a sequence; measured {' to '.join(dates)}"
    height = TOP + len(groups) * (3 * BAR + GAP) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="t">',
        f"<style>{STYLE}</style>",
        '<title id="t">Time of a training step: ds_hf, FSDP2 and DeepSpeed on two GPUs</title>',
        _text(16, 26, "Time of a training step, in ms (shorter is better)", "title"),
    ]
    x = 16
    for name, label in ENGINES.items():
        lines += [f'<rect class="{name}" x="{x}" y="42" width="12" height="12" rx="2"/>', _text(x + 18, 53, label)]
        x += 40 + 8 * len(label)
    for index, group in enumerate(groups):
        y = TOP + index * (3 * BAR + GAP)
        lines.append(_text(LEFT - 12, y + 1.5 * BAR + 5, group.label, "", "end"))
        for row, name in enumerate(ENGINES):
            share = group.ms[name] / group.ms["deepspeed"]
            top = y + row * BAR
            lines.append(
                f'<rect class="{name}" x="{LEFT}" y="{top}" width="{FULL * share:.1f}" height="{BAR - 2}" rx="2"/>'
            )
            of = "" if name == "deepspeed" else f"   {share:.2f} x"
            style = f"{name}-text" if name == "ds_hf" else ""
            lines.append(_text(LEFT + FULL * share + 8, top + 12.5, f"{group.ms[name]:,.0f}{of}", style))
    lines += [_text(16, height - 14, note, "small"), "</svg>\n"]
    return "\n".join(lines)


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" xml:space="preserve"{kind}>{escape(text)}</text>'


def main() -> None:
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(draw([newest(setting) for setting in SETTINGS]))
    print(f"wrote {CHART.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
