"""A search as long as the time that is left allows."""

from __future__ import annotations

import pytest

from ds_hf.lr import LrOptions
from ds_hf.lr.budget import fitting, planned, updates_of


def test_the_estimate_is_that_of_the_six_tasks() -> None:
    """docs/learning-rate.md: they took 1105 to 1755 updates, without the looks at the held-out batches."""
    assert 1_100 <= updates_of(LrOptions()) <= 2_200


@pytest.mark.parametrize("seconds", [400.0, 200.0, 100.0, 50.0])
def test_it_fits(seconds: float) -> None:
    options = fitting(LrOptions(total_steps=500), seconds, 0.1)
    assert updates_of(options) * 0.1 <= seconds
    assert updates_of(options) * 0.1 >= 0.4 * min(seconds, 190.0)  # and uses what there is
    assert options.total_steps == 500


def test_enough_time_changes_nothing_and_too_little_gives_the_shortest() -> None:
    assert fitting(LrOptions(), 1e6, 0.1) == LrOptions()
    shortest = fitting(LrOptions(total_steps=9), 0.0, 0.1)
    assert updates_of(shortest) < 0.2 * updates_of(LrOptions())
    assert shortest.total_steps == 9


def test_a_plan_is_no_longer_than_what_was_asked_for_and_keeps_the_batches() -> None:
    asked = LrOptions(num_steps=10, confirm_steps=200, train_batches=7)
    assert planned(asked, 1e6, 0.1) == asked
    found = planned(asked, 60.0, 0.1)
    assert (found.num_steps, found.train_batches, found.moment_steps) == (10, 7, 5)
    assert found.confirm_steps < 200
