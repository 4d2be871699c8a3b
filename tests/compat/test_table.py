"""docs/compatibility.md says what the tests here show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat import table


def test_page_has_a_row_for_every_feature(request: pytest.FixtureRequest) -> None:
    """Rows of tests that are not in this session (another file was asked for) are not looked at."""
    here = [item for item in request.session.items if item.path.parent == Path(__file__).parent]
    lines = table.PAGE.read_text().splitlines()
    written = {tuple(cell.strip() for cell in line.split("|")[2:4]) for line in lines if line.startswith("|")}
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
