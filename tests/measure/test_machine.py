"""Launches compared through probes, and pooled."""

from __future__ import annotations

import math
import random

import pytest

from ds_hf.measure.machine import LAUNCH, Level, compared, gain_of, levels_of, pool


def test_a_change_is_taken_out_and_widens() -> None:
    here, there = {"compute": Level(0.018, 0.01)}, {"compute": Level(0.010, 0.01)}
    found = compared(here, there, {})
    assert found.factor == pytest.approx(1.8)
    assert found.error > 3 * compared(there, there, {}).error
    assert compared(there, here, {}).factor == pytest.approx(1 / 1.8)


def test_noise_corrects_nothing_but_counts() -> None:
    found = compared({"compute": Level(0.0103, 0.02)}, {"compute": Level(0.01, 0.02)}, {})
    assert found.factor == 1
    assert found.error == pytest.approx(math.hypot(LAUNCH, 0.02, 0.02))


def test_probes_that_disagree_widen_and_weights_choose() -> None:
    there = {"compute": Level(0.01, 0.001), "communication": Level(0.01, 0.001)}
    here = {"compute": Level(0.01, 0.001), "communication": Level(0.04, 0.001)}
    even = compared(here, there, {})
    assert even.factor == pytest.approx(2)
    assert even.error > 0.5
    assert compared(here, there, {"communication": 0.0}).factor == 1
    assert compared(here, there, {"compute": 0.0}).factor == pytest.approx(4)


def test_without_probes_nothing_is_known() -> None:
    assert levels_of(None) == levels_of({"drift": 1.0}) == {}
    assert levels_of({"levels": {"copy": [0.5, 0.1]}}) == {"copy": Level(0.5, 0.1)}
    assert compared({}, {"compute": Level(1.0)}, {}).factor == 1


def test_pooled_intervals_hold_the_truth_though_launches_differ() -> None:
    rng, held = random.Random(0), 0
    for _ in range(500):
        found = pool([(math.exp(rng.gauss(0, 0.03)), 0.03) for _ in range(3)])
        held += found.low <= 1 <= found.high
    assert held >= 460
    assert pool([(1.0, 0.01), (1.5, 0.01)]).error > 0.1  # they say different things: the mean is unsure
    assert pool([(2.0, 0.1)]).seconds == 2
    with pytest.raises(ValueError, match="no launch"):
        pool([])


def test_gain_has_an_interval() -> None:
    gain, low, high = gain_of(pool([(2.0, 0.03)]), pool([(1.0, 0.04)]))
    assert gain == pytest.approx(2)
    assert high / gain == pytest.approx(gain / low) == pytest.approx(math.exp(1.96 * 0.05))
