"""Rules on curves of which the answers are known."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from ds_hf.lr import LrOptions, Sweep, landmarks, mean_curve
from ds_hf.lr.rules import moving_average, steepest, valley

RATES = [10 ** (-6 + 0.07 * k) for k in range(100)]  # 1e-6 to 8.5


def loss_at(lr: float) -> float:
    """4 at first, falls to 1 around 1e-2, turns at 0.1 and is infinite above 1."""
    x = math.log10(lr)
    fallen = 3 / (1 + math.exp(-4 * (x + 3)))
    risen = 8 * max(0.0, x + 1) ** 2
    return math.inf if lr > 1 else 4 - fallen + risen


def sweep(seed: int = 0, noise: float = 0.0) -> Sweep:
    generator = np.random.default_rng(seed)
    rates = tuple(lr for lr in RATES if lr <= 1)
    train = tuple(loss_at(lr) + noise * generator.normal() for lr in rates)
    held = rates[::4]
    return Sweep(seed, rates, train, held, tuple(loss_at(lr) for lr in held), diverged_at=1.05)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_landmarks(noise: float) -> None:
    marks = landmarks([sweep(0, noise), sweep(1, noise)])
    assert 1e-4 < marks.low < 5e-4  # 5 % of the fall
    assert 0.02 < marks.best < 0.3
    assert 0.2 < marks.limit < 0.6  # a tenth of the fall above the lowest
    assert marks.bounded
    assert marks.fallen == pytest.approx(3, abs=0.1)
    assert marks.low <= marks.best <= marks.limit


def test_a_curve_that_never_turns_has_the_end_for_its_limit() -> None:
    rates = tuple(RATES[:60])
    losses = tuple(5 - 0.05 * k for k in range(60))
    marks = landmarks([Sweep(0, rates, losses, rates, losses)])
    assert not marks.bounded
    assert marks.limit == rates[-1]


def test_nothing_to_read() -> None:
    with pytest.raises(ValueError, match="fewer than three finite losses"):
        landmarks([Sweep(0, (1e-3,), (math.nan,), (), (), diverged_at=1e-3)])


def test_divergence_of_one_order_counts() -> None:
    early = Sweep(1, *(sweep().lrs[:70], sweep().train[:70]), sweep().held_out_lrs, sweep().held_out, diverged_at=0.05)
    assert landmarks([sweep(), early]).limit == 0.05


def test_mean_curve_ends_with_the_shortest() -> None:
    one = Sweep(0, (1.0, 2.0, 3.0), (1.0, 2.0, math.inf), (), ())
    two = Sweep(1, (1.0, 2.0, 3.0), (3.0, 4.0, 5.0), (), ())
    curve = mean_curve([one, two], held_out=False)
    assert curve.lrs.tolist() == [1, 2]
    assert curve.losses.tolist() == [2, 3]


def test_smoothing_has_no_lag() -> None:
    curve = mean_curve([sweep()], held_out=False)
    middle = np.interp(2.5, curve.losses[:70][::-1], np.log10(curve.lrs[:70])[::-1])
    smooth = curve.smooth()
    assert np.interp(2.5, smooth.losses[:70][::-1], np.log10(smooth.lrs[:70])[::-1]) == pytest.approx(middle, abs=0.02)


def test_steepest_is_where_the_loss_falls_fastest() -> None:
    losses = [loss_at(lr) for lr in RATES[:80]]
    found = steepest(RATES[:80], losses)
    assert found == pytest.approx(1e-3, rel=0.2)
    assert steepest(RATES[:5], losses[:5]) is None


def test_moving_average() -> None:
    assert moving_average([2.0, 2.0, 2.0]) == pytest.approx([2, 2, 2])
    assert moving_average([1.0, 0.0], beta=0.5) == pytest.approx([1, 1 / 3])


def plain_valley(lrs: list[float], losses: list[float]) -> float:
    """fastai's definition, by dynamic programming."""
    lengths, best, end = [1] * len(losses), 1, 0
    for k, j in itertools.combinations(range(len(losses)), 2):
        if losses[j] < losses[k]:
            lengths[j] = max(lengths[j], lengths[k] + 1)
    for i, length in enumerate(lengths):
        if length > best:
            best, end = length, i
    third = best / 3
    return lrs[max(end - best, 0) + int(third) + int(third / 2)]


@pytest.mark.parametrize("seed", range(40))
def test_valley_by_definition(seed: int) -> None:
    generator = np.random.default_rng(seed)
    losses = generator.integers(0, 30, size=generator.integers(20, 60)).astype(float).tolist()
    lrs = [float(k) for k in range(len(losses))]
    first, last = len(losses) // 10, len(losses) - 5
    assert valley(lrs, losses) == plain_valley(lrs[first:last], losses[first:last])


def test_sweep_as_json() -> None:
    one = Sweep(3, (1.0, 2.0), (1.0, math.inf), (1.0,), (0.5,), (0.1, math.nan), 2, 2.0)
    text = json.dumps(one.to_dict(), allow_nan=False)
    back = Sweep.from_dict(json.loads(text))
    assert (back.seed, back.lrs, back.skipped, back.diverged_at) == (3, (1.0, 2.0), 2, 2.0)
    assert math.isnan(back.train[1])


@pytest.mark.parametrize("mode", ["exp", "linear"])
@pytest.mark.parametrize("staircase", [1, 5])
def test_rates_of_a_sweep(mode: str, staircase: int) -> None:
    options = LrOptions(min_lr=1e-4, max_lr=1e-1, num_steps=41, mode=mode, staircase=staircase)  # type: ignore[arg-type]
    rates = [options.sweep_lr(step) for step in range(41)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[40] == pytest.approx(1e-1)
    assert len(set(rates)) == 40 // staircase + 1
    steps = [b / a if mode == "exp" else b - a for a, b in itertools.pairwise(sorted(set(rates)))]
    assert max(steps) == pytest.approx(min(steps))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"min_lr": 1.0, "max_lr": 0.1}, "0 < min_lr < max_lr"),
        ({"min_lr": 0.0}, "0 < min_lr < max_lr"),
        ({"max_lr": math.inf}, "0 < min_lr < max_lr"),
        ({"num_steps": 5}, "num_steps must be a whole number of at least 10"),
        ({"seeds": 0}, "seeds must be"),
        ({"seeds": 1.5}, "seeds must be"),
        ({"mode": "cubic"}, "mode must be"),
        ({"total_steps": 0}, "total_steps"),
        ({"stop_factor": -1.0}, "stop_factor"),
    ],
)
def test_options_that_cannot_be(changes: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LrOptions(**changes)  # type: ignore[arg-type]
