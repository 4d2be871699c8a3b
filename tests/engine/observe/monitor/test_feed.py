"""What is written while an engine trains is what the loop saw: losses, rates, loss scales, counts of samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_hf import Engine, initialize
from ds_hf.engine.observe.monitor.feed import Feed
from ds_hf.engine.observe.probes.learning_rate.probe import _quiet
from ds_hf.engine.optim.outcome import Outcome
from tests.engine.observe.monitor.common import LOSS, LR, SCALE, batch, make, micro_batch, rows, train
from tests.engine.observe.monitor.slow_device import Slow, become_slow
from tests.engine.zero.zoo import mean_square
from tests.helpers.distributed import run_distributed
from tests.helpers.parity import base_config

STEPS = 4


def feeds(engine: Any) -> bool:
    """Whether something writes what ``engine`` does to its monitors."""
    return any(type(each) is Feed for each in engine.events.observers)


def _run(folder: Path, stage: int, bf16: bool) -> tuple[bool, list[float], list[float]]:
    engine = make(folder, stage, bf16={"enabled": bf16})
    losses, rates = train(engine, STEPS, seed=1000 * engine.axis.rank)
    assert engine.global_samples == STEPS * 8
    return feeds(engine), losses, rates


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (1, True), (2, False), (3, True)])
def test_rows_are_the_losses_and_rates_of_rank_0(stage: int, bf16: bool, tmp_path: Path) -> None:
    (feeds, losses, rates), (feeds_other, other, _) = run_distributed(_run, 2, tmp_path, stage, bf16)
    assert (feeds, feeds_other) == (True, False)
    assert losses != other
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == [f"run/{LR}", f"run/{LOSS}"]
    samples = [8 * (step + 1) for step in range(STEPS)]
    written = rows(tmp_path / "run" / LOSS)
    assert [x for x, _ in written] == samples
    assert [value for _, value in written] == pytest.approx(losses, rel=1e-6)
    assert rows(tmp_path / "run" / LR) == list(zip(samples, rates, strict=True))
    assert len(set(rates)) == STEPS  # the schedule moved


def _overflow(folder: Path) -> tuple[list[float], list[float], list[float]]:
    engine = make(folder, 2, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    rates, scales = [], []
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        for index in range(2):
            micro_batch(engine, 10 * step + index, factor)
        rates.append(engine.get_lr()[0])
        scales.append(engine.loss_scale())
    assert engine.skipped_steps == 1
    return rates, scales, [x for x, _ in rows(folder / "run" / LOSS)]


def test_fp16_writes_the_scale_and_a_skipped_step_has_a_row_and_no_new_rate(tmp_path: Path) -> None:
    ((rates, scales, samples),) = run_distributed(_overflow, 1, tmp_path)
    assert samples == [4, 8, 12]
    assert [value for _, value in rows(tmp_path / "run" / SCALE)] == scales == [256.0, 128.0, 128.0]
    assert [value for _, value in rows(tmp_path / "run" / LR)] == rates
    assert rates[0] == rates[1] < rates[2]
    assert [value for _, value in rows(tmp_path / "run" / LOSS)][1] == float("inf")


def _resumed(folder: Path) -> tuple[list[float], list[float]]:
    first = make(folder, 1)
    losses, rates = train(first, 3)
    first.save_checkpoint(folder / "saved")
    first.destroy()
    second = make(folder, 1)
    second.load_checkpoint(folder / "saved")
    more, others = train(second, 2, seed=5000)
    second.destroy()
    return losses + more, rates + others


def test_a_resumed_run_goes_on_in_its_files(tmp_path: Path) -> None:
    ((losses, rates),) = run_distributed(_resumed, 1, tmp_path)
    assert rows(tmp_path / "run" / LR) == list(zip((4, 8, 12, 16, 20), rates, strict=True))
    assert [value for _, value in rows(tmp_path / "run" / LOSS)] == pytest.approx(losses, rel=1e-6)


def _other_ways(folder: Path) -> list[float]:
    """``engine.scale(loss).backward()``, a boundary set by hand as accelerate does, a loss changed afterwards."""
    engine = make(folder)
    expected = []
    losses = [mean_square(engine(batch(seed))) for seed in (1, 2)]
    for loss in losses:
        engine.scale(loss).backward()  # type: ignore[no-untyped-call]
        engine.step()
    expected.append(sum(loss.item() for loss in losses) / 2)
    for last in (False, True):
        engine.set_gradient_accumulation_boundary(last)
        loss = mean_square(engine(batch(3 + last))) / 2
        engine.backward(loss, scale_wrt_gas=False)
        losses[int(last)] = loss.detach().clone()
        loss.detach().mul_(100.0)
    engine.step()
    expected.append(sum(loss.item() for loss in losses))
    for seed in (5, 6):  # the engine never sees these
        engine.set_gradient_accumulation_boundary(seed == 6)
        mean_square(engine(batch(seed))).backward()  # type: ignore[no-untyped-call]
    engine.step()
    return expected


def test_the_ways_of_a_backward(tmp_path: Path) -> None:
    (expected,) = run_distributed(_other_ways, 1, tmp_path)
    assert [x for x, _ in rows(tmp_path / "run" / LOSS)] == [4, 8]
    assert [value for _, value in rows(tmp_path / "run" / LOSS)] == pytest.approx(expected, rel=1e-6)
    assert [x for x, _ in rows(tmp_path / "run" / LR)] == [4, 8, 12]


def _silent(folder: Path) -> None:
    engine = make(folder, csv_monitor={"enabled": False, "output_path": str(folder)})
    assert not feeds(engine)
    assert not engine.monitor.enabled
    train(engine, 1)
    engine.monitor.write_events([("a", 1.0, 1)])
    assert not list(folder.iterdir())
    engine = make(folder)
    train(engine, 1)
    with _quiet(engine):  # a search of learning rates
        train(engine, 2)
    train(engine, 1)
    assert len(rows(folder / "run" / LOSS)) == 2
    engine.monitor.write_events([("mine", torch.tensor(0.5), engine.global_samples)])
    assert (folder / "run" / "mine.csv").read_text().splitlines() == ["step,mine", "16,0.5"]


def test_nothing_is_kept_where_nothing_is_on_and_nothing_written_during_a_search(tmp_path: Path) -> None:
    run_distributed(_silent, 1, tmp_path)


def _replaced(folder: Path) -> tuple[list[tuple[str, float]], list[float], list[float]]:
    engine = make(folder)
    train(engine, 1)
    written: list[Any] = []
    engine.monitor = SimpleNamespace(enabled=True, writes=True, write_events=written.extend)  # type: ignore[assignment]
    losses, rates = train(engine, 2, seed=7)
    engine.destroy()
    assert [x for _, _, x in written] == [8, 8, 12, 12]
    return [(name.rpartition("/")[2], value) for name, value, _ in written], losses, rates


def test_a_monitor_put_in_its_place_is_told_from_then_on(tmp_path: Path) -> None:
    ((written, losses, rates),) = run_distributed(_replaced, 1, tmp_path)
    assert [value for name, value in written if name == "train_loss"] == pytest.approx(losses, rel=1e-6)
    assert [value for name, value in written if name == "lr"] == rates
    assert len(rows(tmp_path / "run" / LOSS)) == 1, "the one before is told no more"


# -- a device that answers later -----------------------------------------------------------------------------------


class CountedOutcome(Outcome):
    """Of a device that answers only when it is waited for; counts how often the host does."""

    asked = 0
    on_host = known = False  # type: ignore[assignment]

    def _value(self) -> float:
        CountedOutcome.asked += 1
        return super()._value()


def _later(folder: Path) -> tuple[list[float], list[float]]:
    become_slow()
    engine = make(folder, bf16={"enabled": True, "check_grad_overflow": True}, gradient_clipping=1.0)
    assert engine.optimizer is not None
    engine.optimizer._outcome = CountedOutcome()
    path = folder / "run" / LOSS
    losses = []
    factors = (1.0, float("nan"), 1.0, 1.0)
    for step, factor in enumerate(factors):
        values = []
        for index in range(2):
            loss = mean_square(engine(batch(10 * step + index)).float()) * factor
            engine.backward(loss)
            values.append(loss.detach())
            engine.step()
        assert CountedOutcome.asked == step  # of each step but this one: it is not waited for
        losses.append(sum(value.item() for value in values) / 2)
        assert len(rows(path)) == step if step else not path.exists()
        assert not Slow.made[-1].arrived
    rates = engine.get_lr()  # asks: the last row is written
    assert len(rows(path)) == len(factors)
    assert engine.skipped_steps == 1
    train(engine, 1)
    engine.destroy()
    assert len(rows(path)) == len(factors) + 1
    return losses, rates


def test_rows_come_one_step_later_with_the_rate_that_a_skipped_step_leaves(tmp_path: Path) -> None:
    ((losses, last),) = run_distributed(_later, 1, tmp_path)
    written = rows(tmp_path / "run" / LOSS)
    assert [x for x, _ in written] == [4, 8, 12, 16, 20]
    assert [value for _, value in written][:4] == pytest.approx(losses, rel=1e-6, nan_ok=True)
    rates = [value for _, value in rows(tmp_path / "run" / LR)]
    assert rates[0] == rates[1] < rates[2] < rates[3] == last[0] < rates[4]


def _forgotten(folder: Path) -> tuple[bool, int]:
    engine: Engine = initialize(model=torch.nn.Linear(2, 2), config=base_config(0, optimizer=None))[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    return not feeds(engine), len(list(folder.iterdir()))


def test_an_engine_without_optimizer_has_no_feed(tmp_path: Path) -> None:
    assert run_distributed(_forgotten, 1, tmp_path) == [(True, 0)]
