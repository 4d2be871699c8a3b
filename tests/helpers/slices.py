"""A slice of the tests, and no more of them than fit into a time: ``--slice 3/7 --minutes 12``.

A slice is a function of the names of tests alone, so that seven of them are all tests. What is left of a slice when its
time is over is skipped and told in one line, and is no failure. The order begins a quarter further on each week, so
what was left comes in the weeks after.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import date
from typing import Any, TypeVar
from zlib import crc32

import pytest

__all__ = ["Slice", "parse", "rotated", "this_week"]

PARTS = 4  # weeks in which the order comes round
_WEEK, _END = "DS_HF_SLICE_WEEK", "DS_HF_SLICE_END"  # the same for all workers of a run, at midnight too
_LEFT = "left for another week: the time of this slice is over"
T = TypeVar("T")


def parse(text: str) -> tuple[int, int]:
    """``"3/7"`` as 2 and 7.

    Raises:
        ValueError: with a sentence, where it is no slice.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"{text!r} is no slice: the third of seven is 3/7")
    return int(number) - 1, int(count)


def this_week(day: date) -> int:
    """The number of its ISO week, which goes on over New Year."""
    return (day.toordinal() - 1) // 7


def rotated(items: Sequence[T], week: int) -> list[T]:
    """In the order of ``week``: any four weeks begin at the four quarters."""
    start = -(-len(items) // PARTS) * (week % PARTS)
    return [*items[start:], *items[:start]]


class Slice:
    """The plugin of a run, on the process that was called and on its workers."""

    def __init__(self, text: str, minutes: float) -> None:
        self.text, self.minutes = text, minutes
        self.number, self.count = parse(text)
        self.week = int(os.environ.setdefault(_WEEK, str(this_week(date.today()))))
        self.end = float(os.environ.setdefault(_END, str(time.time() + 60 * minutes)))
        self.left = 0

    @pytest.hookimpl(trylast=True)  # after those that ``-m`` leaves out are gone
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = [item for item in items if crc32(item.nodeid.encode()) % self.count == self.number]
        chosen = set(map(id, mine))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = rotated(mine, self.week)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self.end:
            pytest.skip(_LEFT)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.left += report.skipped and _LEFT in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        told = (
            f"{self.left} tests were left when {self.minutes:g} minutes were over" if self.left else "all of it has run"
        )
        terminalreporter.write_line(f"slice {self.text}: {told}")
