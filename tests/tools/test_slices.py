"""Slices of the slow tests: all of them are all tests, and what does not fit into the time is left and told."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.helpers.interpreter import python
from tests.helpers.slices import parse, rotated, turn_of

ROOT = Path(__file__).parents[2]


def _run(*args: str) -> str:
    """What pytest says of the tests of this file that are below, asked for with ``args``."""
    tests = f"{__file__}::test_days_and_weeks"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = python("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, *args, cwd=ROOT, env=environment)
    return f"{ran.returncode} {ran.stdout} {ran.stderr}"


@pytest.mark.parametrize("number", [*range(9), pytest.param(9, marks=pytest.mark.minutes(6))])
def test_days_and_weeks(number: int) -> None:
    day = datetime(2026, 12, 28 - number, 1)
    through_a_day = [turn_of(day + timedelta(hours=hours)) for hours in (0, 6, 12, 18)]
    through_weeks = [turn_of(day + timedelta(weeks=weeks)) for weeks in range(4)]
    for turns in (through_a_day, through_weeks):
        assert turns == list(range(turns[0], turns[0] + 4))
        first = [rotated(range(10), turn)[:3] for turn in turns]
        assert {test for part in first for test in part} == set(range(10)), "four turns begin everywhere"
    assert turn_of(datetime(2027, 1, 3, 23)) - 3 + 1 == turn_of(datetime(2027, 1, 4)), "a year ends within a week"
    assert sorted(rotated(range(10), number)) == list(range(10))


def test_a_slice_and_its_time() -> None:
    counts = []
    for number in (1, 2):
        told = _run("--slice", f"{number}/2")
        assert told.startswith("0 "), told
        assert f"slice {number}/2: all of it has run" in told
        counts.append(int(told.partition(" passed")[0].split()[-1]))
    assert sum(counts) == 10
    told = _run("--slice", "1/1", "--minutes", "5")
    assert told.startswith("0 "), told
    assert "slice 1/1: 1 tests were left when 5 minutes were over" in told, "one takes longer than what is left"
    told = _run("--slice", "1/1", "--minutes", "-1", "-n", "2")
    assert told.startswith("0 "), told
    assert "slice 1/1: 10 tests were left when -1 minutes were over" in told


@pytest.mark.parametrize("text", ["0/7", "8/7", "3", "x/7", "3/"])
def test_what_is_no_slice(text: str) -> None:
    with pytest.raises(ValueError, match="the third of seven is 3/7"):
        parse(text)
