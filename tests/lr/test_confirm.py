"""The search among confirming runs, against losses that are known functions of rate and length."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ds_hf.lr import Decision, Landmarks, PlannedRun, RunResult, decide, run_lr, so_far
from ds_hf.lr.confirm import FINE, HORIZON


def marks(limit: float) -> Landmarks:
    return Landmarks(limit / 1000, limit / 10, limit, True, None, None, 1.0)


def converse(
    loss: Callable[[PlannedRun], float], limit: float, seeds: int = 2, total: int | None = None
) -> tuple[Decision, list[PlannedRun]]:
    asking = decide(marks(limit), 50, range(seeds), total)
    runs = [next(asking)]
    while True:
        try:
            runs.append(asking.send(loss(runs[-1])))
        except StopIteration as end:
            return end.value, runs


def bowl(best: float, breaks: float = math.inf) -> Callable[[PlannedRun], float]:
    """A parabola over the logarithm, infinite above ``breaks``."""
    return lambda run: math.inf if run.lr > breaks else 2 + 0.3 * math.log10(run.lr / best) ** 2


@pytest.mark.parametrize("best", [1e-4, 3e-4, 2e-3, 7e-3, 2e-2, 0.3])
def test_the_lowest_point_is_found_wherever_it_lies(best: float) -> None:
    """Also three decades below the limit of stability and above it."""
    decision, runs = converse(bowl(best), limit=0.03)
    assert decision.lr == pytest.approx(best, rel=0.01)
    assert decision.low <= decision.lr <= decision.high
    assert len(runs) <= 22


def test_at_the_edge_of_stability_the_last_rate_that_holds() -> None:
    decision, _ = converse(bowl(10.0, breaks=0.5), limit=0.3, total=10_000)
    assert 0.25 < decision.lr <= 0.5


def test_longer_trainings_get_lower_rates() -> None:
    short, _ = converse(bowl(1e-2), limit=0.03)
    long, _ = converse(bowl(1e-2), limit=0.03, total=50 * FINE * 32)
    assert long.lr == pytest.approx(short.lr * 32**HORIZON)
    same, _ = converse(bowl(1e-2), limit=0.03, total=20)
    assert same.lr == short.lr


def test_the_longer_runs_use_every_seed_and_are_longer() -> None:
    _, runs = converse(bowl(3e-3), limit=0.03, seeds=3)
    coarse, fine = [r for r in runs if r.steps == 50], [r for r in runs if r.steps == 100]
    assert {run.seed for run in coarse} == {0}
    assert {run.seed for run in fine} == {0, 1, 2}
    assert len(coarse) + len(fine) == len(runs)


def test_noise_of_one_order_is_averaged() -> None:
    def loss(run: PlannedRun) -> float:
        return bowl(3e-3)(run) + (0.02 if run.seed == 0 else -0.02) * math.sin(run.lr * 1e4)

    decision, _ = converse(loss, limit=0.03)
    assert decision.lr == pytest.approx(3e-3, rel=0.05)


def test_nothing_holds() -> None:
    with pytest.raises(ValueError, match="diverge at every learning rate"):
        converse(lambda run: math.inf, limit=0.03)


def test_when_only_short_runs_hold_they_decide() -> None:
    decision, _ = converse(lambda run: math.inf if run.steps > 50 else bowl(1e-3)(run), limit=0.03)
    assert 3e-4 < decision.lr < 3e-3


def test_longer_runs_go_down_until_they_hold() -> None:
    """They diverge at rates at which the short ones did best."""
    decision, _ = converse(lambda run: math.inf if run.steps > 50 and run.lr > 5e-3 else bowl(0.03)(run), limit=0.1)
    assert 2e-3 < decision.lr <= 5e-3


def test_a_plateau_at_high_rates_does_not_end_the_ladder() -> None:
    def loss(run: PlannedRun) -> float:
        return min(2.6 + 0.1 * math.log10(run.lr / 0.08) ** 2, 2 + 2 * math.log10(run.lr / 3e-3) ** 2)

    decision, _ = converse(loss, limit=0.8)
    assert decision.lr == pytest.approx(3e-3, rel=0.1)


def test_a_run_warms_up_and_decays() -> None:
    rates = [run_lr(PlannedRun(1.0, 50, 0), step) for step in range(50)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(rates) == 1
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.05


def test_the_best_of_what_there_is() -> None:
    """The longer runs count once three rates are known; where nothing has held there is none."""
    loss = bowl(1e-3, breaks=1e-2)

    def made(steps: int, rates: list[float]) -> list[RunResult]:
        return [RunResult(run, loss(run)) for run in (PlannedRun(lr, steps, 0) for lr in rates)]

    short = made(50, [1e-1, 3e-2, 1e-2, 3e-3])
    assert so_far([]) is None
    assert so_far(short[:2]) is None
    assert so_far(made(50, [1e-3])) is None  # at the limit, and compared with nothing: it was the suggestion
    two = so_far(made(50, [3e-3, 1e-3]))
    assert two is not None
    assert two.lr == 1e-3
    found = so_far([*short, *made(100, [1e-3, 2e-3])])
    assert found is not None
    assert found.lr == 3e-3
    better = so_far([*short, *made(100, [3e-4, 1e-3, 3e-3])])
    assert better is not None
    assert better.lr == pytest.approx(1e-3, rel=0.1)
    assert "of runs of 100 updates" in better.reason
