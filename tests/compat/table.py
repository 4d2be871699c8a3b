"""The tables of docs/compatibility.md, made from the tests: one row a ``feature`` mark, with where its tests passed.

    pytest tests/compat --write-table                  # the table, from the tests there are
    pytest tests/compat --record "1 x H200"            # also note which passed on this machine

What passes on the development machine needs no record: a test that fails there does not land.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
RECORDS = Path(__file__).parent / "records.json"
BEGIN, END = "<!-- made by `pytest tests/compat --write-table` -->", "<!-- end -->"


class Row(NamedTuple):
    """One feature: where users know it from, its name, the pain of the user it ends, the names of its tests."""

    area: str
    feature: str
    pain: str
    tests: tuple[str, ...]


def rows(items: Iterable[pytest.Item]) -> list[Row]:
    """Rows of the marks on ``items``, by area and then in the order of the tests."""
    found: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for item in items:
        for mark in item.iter_markers("feature"):
            pains, tests = found.setdefault((mark.args[0], mark.args[1]), ([], []))
            pains += [pain for pain in mark.kwargs.get("pain", "").split() if pain not in pains]
            name = test_name(item)
            if name not in tests:
                tests.append(name)
    areas = list(dict.fromkeys(area for area, _ in found))
    ordered = sorted(found.items(), key=lambda entry: areas.index(entry[0][0]))
    return [Row(area, feature, " ".join(pains), tuple(tests)) for (area, feature), (pains, tests) in ordered]


def test_name(item: pytest.Item) -> str:
    """``file.py::function``, without parameters."""
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


test_name.__test__ = False  # type: ignore[attr-defined]


def render(table: list[Row], records: dict[str, dict[str, str]]) -> str:
    """The tables in Markdown, one an area; a cell of a machine says whether all tests of the row passed there."""
    head = ["feature", "pain", "2 x CPU", *records, "tests"]
    lines: list[str] = []
    for area, inside in groupby(table, key=lambda row: row.area):
        lines += [f"\n### {area}\n", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for row in inside:
            cells = [_cell([results.get(test) for test in row.tests]) for results in records.values()]
            tests = ", ".join(f"`{test}`" for test in row.tests)
            lines.append("| " + " | ".join([row.feature, row.pain, "yes", *cells, tests]) + " |")
    return "\n".join(lines)


def _cell(outcomes: list[str | None]) -> str:
    if all(outcome == "passed" for outcome in outcomes):
        return "yes"
    if any(outcome == "failed" for outcome in outcomes):
        return "no"
    return "not run" if None in outcomes else "yes" if "passed" in outcomes else "skipped"


def write(items: Iterable[pytest.Item]) -> None:
    """Put the table into the page."""
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:start]}\n{render(rows(items), load_records())}\n{text[end:]}")


def load_records() -> dict[str, dict[str, str]]:
    """Outcomes of the tests on other machines: ``{machine: {test: outcome}}``."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}  # type: ignore[no-any-return]


class Recorder:
    """Notes the worst outcome of each test function."""

    def __init__(self, machine: str, path: Path) -> None:
        self.machine, self.path = machine, path
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        file, _, function = report.nodeid.rpartition("::")
        name = f"{Path(file).name}::{function.split('[')[0]}"
        ranking = ("skipped", "passed", "failed")
        before = self.outcomes.get(name, "skipped")
        self.outcomes[name] = max(before, report.outcome, key=ranking.index)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        records = json.loads(self.path.read_text()) if self.path.exists() else {}
        records[self.machine] = dict(sorted({**records.get(self.machine, {}), **self.outcomes}.items()))
        self.path.write_text(json.dumps(records, indent=1) + "\n")
