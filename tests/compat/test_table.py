"""docs/compatibility.md says what the tests here show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat import table


def test_page_has_a_row_for_every_feature(request: pytest.FixtureRequest) -> None:
    """Rows of tests that are not in this session (another file was asked for) are not looked at."""
    here = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    lines = table.PAGE.read_text().splitlines()
    written = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines if line.startswith("|")}
    missing = [row.feature for row in table.rows(here) if (row.feature, row.pain) not in written]
    assert not missing, "run: pytest tests/compat --write-table"


def test_every_test_named_in_the_page_exists() -> None:
    page = table.PAGE.read_text()
    section = page[page.index(table.BEGIN) : page.index(table.END)]
    named = {
        cell.strip(" `") for line in section.splitlines() if "::" in line for cell in line.split("|")[-2].split(",")
    }
    assert named
    for name in named:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (Path(__file__).parent / file).read_text(), name


# How an answer in the tables written by hand begins, and what it means.
ANSWERS = {"yes": True, "works": True, "work ": True, "not yet": False, "refused": False}


def _rows_by_hand(page: str) -> Iterator[tuple[str, str, str]]:
    """Title, feature and answer of each row of the tables that are not made from tests."""
    title = ""
    for line in (page[: page.index(table.BEGIN)] + page[page.index(table.END) :]).splitlines():
        if line.startswith("#"):
            title = line.strip("# ")
        elif line.startswith("|") and not set(line) <= set("|- "):
            feature, answer = (cell.strip() for cell in line.split("|")[1:3])
            if answer not in ("status", "does it work?"):
                yield title, feature, answer


def contradictions(page: str) -> list[str]:
    """Features with two rows in a table, with two answers on the page, or denied in the row of another."""
    told, rows, names = [], set[tuple[str, str]](), dict[str, tuple[bool, str]]()
    for title, feature, answer in _rows_by_hand(page):
        if (title, feature) in rows:
            told.append(f"{feature!r} has two rows in {title!r}")
        rows.add((title, feature))
        if "not yet" in answer.removeprefix("not yet"):
            told.append(f"{answer!r} of {feature!r} denies something else: give that a row of its own")
        is_there = next((meant for word, meant in ANSWERS.items() if answer.startswith(word)), None)
        if is_there is None:
            continue
        for name in (part.strip(" `") for part in re.split(r"[,;](?![^(]*\))", feature)):
            before, other = names.setdefault(name, (is_there, feature))
            if before != is_there:
                told.append(f"{name!r} is there and is not there: {other!r}, {feature!r}")
    return told


def test_a_feature_has_one_answer() -> None:
    page = table.PAGE.read_text()
    assert len(list(_rows_by_hand(page))) > 80
    assert not contradictions(page)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (["| Adam, Lion | yes; 1-bit optimizers not yet |"], "denies something else"),
        (["| Twinkle | not yet |", "| Muon, Twinkle | works |"], "'Twinkle' is there and is not there"),
        (["| a | works |", "| a | another word |"], "'a' has two rows in 'Title'"),
    ],
)
def test_contradictions_are_found(rows: list[str], told: str) -> None:
    page = "\n".join(["# Title", "| | status |", "|---|---|", *rows, table.BEGIN, table.END])
    (found,) = contradictions(page)
    assert told in found
