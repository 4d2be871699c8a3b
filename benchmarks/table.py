"""The tables of results: one file a benchmark in ``benchmarks/results``, one run a line.

    python benchmarks/table.py training 2xh200-1b3-stage2 FILE      # adds what `training.py --json FILE` wrote

A line is a JSON object: ``date``, ``setting`` (the machine first), and what the benchmark wrote, a bare list as
``records``. A run under a setting that is there already takes the place of the older one, unless a figure in the docs
still is the older one's: ``--keep``.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def runs(benchmark: str, setting: str | None = None) -> list[dict[str, Any]]:
    """The runs of a benchmark, oldest first; of one setting if given."""
    lines = (RESULTS / f"{benchmark}.jsonl").read_text("utf-8").splitlines()
    return [run for run in map(json.loads, lines) if setting in (None, run["setting"])]


def add(benchmark: str, setting: str, result: Any, *, keep: bool = False) -> None:
    """Put one run into the table of its benchmark, in the order of dates."""
    found = result if isinstance(result, dict) else {"records": result}
    run = {"date": date.today().isoformat(), "setting": setting, **found}
    table = RESULTS / f"{benchmark}.jsonl"
    others = [old for old in runs(benchmark) if keep or old["setting"] != setting] if table.exists() else []
    ordered = sorted([*others, run], key=lambda each: str(each["date"]))
    table.write_text("".join(json.dumps(each) + "\n" for each in ordered), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark")
    parser.add_argument("setting")
    parser.add_argument("file", type=Path, help="what the benchmark wrote with --json")
    parser.add_argument("--keep", action="store_true", help="keep older runs of this setting")
    args = parser.parse_args()
    add(args.benchmark, args.setting, json.loads(args.file.read_text("utf-8")), keep=args.keep)


if __name__ == "__main__":
    main()
