"""Median, interval and warm-up of step times."""

from __future__ import annotations

import random
import statistics

import pytest

from ds_hf.measure.statistics import quantile_ranks, summarise, warm_up_length


def test_warm_up_is_cut() -> None:
    rng = random.Random(0)
    steady = [0.1 + rng.gauss(0, 0.001) for _ in range(20)]
    assert warm_up_length([5.0, 1.0, 0.3, *steady]) == 3
    found = summarise([5.0, 1.0, 0.3, *steady])
    assert found.median == pytest.approx(statistics.median(steady))
    assert found.steps == 20


def test_steady_steps_and_fast_starts_are_kept() -> None:
    assert warm_up_length([0.1] * 12) == 0
    assert warm_up_length([0.05, 0.1, 0.1, 0.1, 0.1, 0.1]) == 0  # a fast first step is no warm-up
    assert summarise([0.2]).median == 0.2


def test_interval_covers_the_median_19_times_of_20() -> None:
    """Of a skewed distribution whose true median is known."""
    rng = random.Random(1)
    covered = 0
    for _ in range(2000):
        values = sorted(rng.lognormvariate(0, 0.5) for _ in range(15))
        low, high = quantile_ranks(15)
        covered += values[low] <= 1.0 <= values[high]
    assert 0.95 <= covered / 2000 < 0.985


@pytest.mark.parametrize(
    ("count", "ranks"), [(1, (0, 0)), (5, (0, 4)), (6, (0, 5)), (9, (1, 7)), (15, (3, 11)), (20, (5, 14))]
)
def test_ranks_are_those_of_the_tables(count: int, ranks: tuple[int, int]) -> None:
    assert quantile_ranks(count) == ranks


def test_nothing_measured() -> None:
    with pytest.raises(ValueError, match="no step"):
        summarise([])
