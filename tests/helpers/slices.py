"""A slice of the tests, and no more of them than fit into a time: ``--slice 3/7 --minutes 12``.

A slice is a function of the names of tests alone, so that seven of them are all tests. What is left of a slice when its
time is over is skipped and told in one line, and is no failure. The order begins a quarter further on every six hours
and each week: what was left comes later in the day, or, with one run a day, in the weeks after. A test that is marked
as long, ``minutes(5)``, begins while so much time is left; those of the first quarter begin at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar
from zlib import crc32

import pytest

__all__ = ["Slice", "parse", "rotated", "turn_of"]

PARTS = 4  # beginnings of the order, one for each quarter of a day
_TURN, _END = "DS_HF_SLICE_TURN", "DS_HF_SLICE_END"  # the same for all workers of a run, at midnight too
_LEFT = "left for another time: that of this slice is over"
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


def turn_of(now: datetime) -> int:
    """Quarters of the day that have passed, and ISO weeks, which go on over New Year."""
    return now.hour * PARTS // 24 + (now.toordinal() - 1) // 7


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """In the order of ``turn``: any four that follow each other begin at the four quarters."""
    start = -(-len(items) // PARTS) * (turn % PARTS)
    return [*items[start:], *items[:start]]


def _minutes(item: pytest.Item) -> float:
    mark = item.get_closest_marker("minutes")
    return mark.args[0] if mark else 0.0


class Slice:
    """The plugin of a run, on the process that was called and on its workers."""

    def __init__(self, text: str, minutes: float) -> None:
        self.text, self.minutes = text, minutes
        self.number, self.count = parse(text)
        self.turn = int(os.environ.setdefault(_TURN, str(turn_of(datetime.now(timezone.utc)))))
        self.end = float(os.environ.setdefault(_END, str(time.time() + 60 * minutes)))
        self.left = 0

    @pytest.hookimpl(trylast=True)  # after those that ``-m`` leaves out are gone
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mine = [item for item in items if crc32(item.nodeid.encode()) % self.count == self.number]
        chosen = set(map(id, mine))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        items[:] = rotated(mine, self.turn)
        quarter = -(-len(items) // PARTS)
        items[:quarter] = sorted(items[:quarter], key=_minutes, reverse=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() + 60 * _minutes(item) > self.end:
            pytest.skip(_LEFT)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.left += report.skipped and _LEFT in str(report.longrepr)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        told = (
            f"{self.left} tests were left when {self.minutes:g} minutes were over" if self.left else "all of it has run"
        )
        terminalreporter.write_line(f"slice {self.text}: {told}")
