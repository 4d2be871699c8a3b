"""Which step of ZenFlow does what."""

from __future__ import annotations

from typing import Any

import pytest

from ds_hf.engine.optim.zenflow.rounds import ROUNDS, Rounds


def letters(rounds: Rounds, count: int, group: dict[str, Any], due: tuple[int, ...] = ()) -> str:
    """F full, U an update of what was put off, lower case otherwise; behind it ! where columns are chosen."""
    found = ""
    for number in range(1, count + 1):
        expected = rounds.ranks_next(group)
        now = rounds.advance(group, due=number in due)
        assert now.ranks == expected
        found += "F" if now.full else "U" if now.updates else "-"
        found += "!" if now.ranks else ""
    return found


@pytest.mark.parametrize(
    ("warm_up", "update", "choose", "expected"),
    [
        (0, 3, 0, "F!--U--U--U"),
        (1, 3, 0, "F!--U--U--U"),
        (3, 2, 4, "FFF!-U-U!-U-U!"),
        (0, 2, 5, "F!-U-UU!-U-UU!"),
        (2, 1, 2, "FF!UU!UU!"),
    ],
)
def test_intervals(warm_up: int, update: int, choose: int, expected: str) -> None:
    count = len(expected.replace("!", ""))
    assert letters(Rounds(warm_up, update, choose), count, {}) == expected


def test_updates_that_are_due_when_gradients_say_so() -> None:
    rounds = Rounds(0, None, 6)
    assert rounds.automatic
    assert letters(rounds, 10, {}, due=(3, 4, 9)) == "F!-UU--U!-U-"


def test_after_an_end_columns_are_chosen_anew_without_a_warm_up() -> None:
    group: dict[str, Any] = {}
    rounds = Rounds(3, 2, 0)
    assert letters(rounds, 6, group) == "FFF!-U-"
    rounds.forget()
    assert letters(rounds, 4, group) == "F!-U-"
    assert group[ROUNDS] == 10
    assert letters(Rounds(3, 2, 0), 3, {ROUNDS: 1}) == "FF!-"
