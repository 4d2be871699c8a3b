"""Batches of a budget of tokens in an engine: two processes, resumed in the middle, against plain torch."""

from __future__ import annotations

import logging.handlers
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as make,
)
from torch import nn

from ds_hf import initialize
from ds_hf.data.batching import batch_by_seqlens
from ds_hf.engine.parallel.budgets import BudgetLoader, lengths_of
from ds_hf.errors import ConfigError
from ds_hf.log import forget_said
from tests.compression.common import logged
from tests.engine.parallel.test_sampling import section as metrics_section
from tests.helpers.distributed import run_distributed

LENGTHS = [int(each) for each in np.random.default_rng(2).integers(3, 20, 61)]
BATCH, BUDGET, STEPS = 4, 50, 9


def settings(folder: str, stage: int, **changes: Any) -> dict[str, Any]:
    budget = {"enabled": True, "metrics_path": f"{folder}/lengths.npy", "max_tokens": BUDGET, **changes}
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": budget}},
    }


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), float(LENGTHS[index])]) / 20


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def by_hand(changed: int = STEPS, later: int = BATCH) -> list[float]:
    """The rate of each step, and a number of the weights in the end; from step ``changed`` on a batch has ``later``
    packs, and the epoch goes on with the next of them that is whole."""
    model, data = net(), Numbers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for step in range(STEPS):
        train = BATCH if step < changed else later
        packs, sizes, _ = batch_by_seqlens(LENGTHS, BUDGET, effective_batch_size=train)
        if step <= changed:
            before = len(batch_by_seqlens(LENGTHS, BUDGET, effective_batch_size=BATCH)[1])
            number = step % before if step < changed else -(-(step % before * BATCH) // later) % len(sizes)
        optimizer.param_groups[0]["lr"] = 0.01 * sizes[number] / train
        found.append(optimizer.param_groups[0]["lr"])
        group = packs[number * train :][:train]
        number = (number + 1) % len(sizes)
        losses = [model(torch.stack([data[sample] for sample in samples])).square().mean() for _, samples in group]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return [*found, sum(float(param.detach().abs().sum()) for param in model.parameters())]


def train(folder: str) -> dict[int, list[float]]:
    result = {}
    for stage in (0, 2):
        found: list[float] = []
        for first, last in ((0, 5), (5, STEPS)):
            given = settings(folder, stage)
            engine, _, loader, schedule = initialize(model=net(), config=given, training_data=Numbers())
            if first:
                engine.load_checkpoint(folder, tag=f"stage{stage}")
            assert schedule is engine.lr_scheduler
            batches = iter(loader)
            for _ in range(first, last):
                found.append(engine.get_lr()[0])
                for _ in range(engine.gradient_accumulation_steps()):
                    try:
                        batch = next(batches)
                    except StopIteration:
                        batches = iter(loader)
                        batch = next(batches)
                    engine.backward(engine(batch).square().mean())
                    engine.step()
            if not first:
                engine.save_checkpoint(folder, tag=f"stage{stage}")
            weights = sum(float(param.detach().abs().sum()) for param in engine.module.parameters())
            engine.destroy()
        result[stage] = [*found, weights]
    return result


def test_two_processes_take_as_many_batches_and_scale_the_rate(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    wanted = by_hand()
    assert len(set(wanted)) > 3
    for found in run_distributed(train, 2, str(tmp_path), timeout=60):
        for numbers in found.values():
            assert numbers == pytest.approx(wanted, rel=1e-5)


def steps_of(loader: Any, engine: Any, count: int) -> list[float]:
    """Train; the rate of each step."""
    found, batches = [], iter(loader)
    for _ in range(count):
        found.append(engine.get_lr()[0])
        for _ in range(engine.gradient_accumulation_steps()):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            engine.backward(engine(batch).square().mean())
            engine.step()
    return found


def goes_on(folder: str) -> dict[Any, list[float]]:
    """From the fifth step on with batches of another size."""
    result = {}
    for first, packs in ((0, BATCH), (5, 2), (5, 3), (5, BATCH)):
        given = {**settings(folder, 1), "train_batch_size": packs}
        engine, _, loader, _ = initialize(model=net(), config=given, training_data=Numbers())
        if first:
            engine.load_checkpoint(folder, tag="other")
            rates = steps_of(loader, engine, STEPS - first)
            result[packs] = [*rates, sum(float(param.detach().abs().sum()) for param in engine.module.parameters())]
        else:
            steps_of(loader, engine, 5)
            engine.save_checkpoint(folder, tag="other")
        engine.destroy()
    return result


def test_a_run_goes_on_with_batches_of_another_size(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    (found,) = run_distributed(goes_on, 1, str(tmp_path), timeout=30)
    for packs, numbers in found.items():
        wanted = by_hand(5, packs)
        assert len(set(wanted)) > 3
        assert numbers == pytest.approx(wanted[5:], rel=1e-5), packs


@pytest.mark.parametrize(("budget", "batch"), [(BUDGET, BATCH), (2 * BUDGET, BATCH), (20, BATCH), (2 * BUDGET, 2)])
def test_another_budget_goes_on_at_the_sample_where_it_stood(budget: int, batch: int) -> None:
    def loader(tokens: int, train: int) -> BudgetLoader:
        ids, sizes, _ = batch_by_seqlens(LENGTHS, tokens, effective_batch_size=train)
        return BudgetLoader(Numbers(), [pack for _, pack in ids], sizes, processes=1, micro=1)

    first = loader(BUDGET, BATCH)
    for _ in zip(range(2 * BATCH), first, strict=False):
        pass
    state = first.state_dict()
    taken = max(first.packs[2 * BATCH - 1])
    second = loader(budget, batch)
    second.load_state_dict(state)
    assert second.state_dict() == state  # what a checkpoint's digest is of
    starts = [pack[0] for pack in second.packs[::batch]]
    assert second.rest()[0][0] == next(start for start in starts if start > taken)


def switched(folder: str) -> dict[str, list[float]]:
    """Rates of six steps, in units of that of the file, then of two more with budgets switched on or off."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.01, "total_num_steps": 9}}
    result = {}
    for scheduled in (False, True):
        for tag, budgets, load in (("on", True, None), ("off", False, None), ("on", False, "on"), ("off", True, "off")):
            given = settings(folder, 0)
            if not budgets:
                del given["data_efficiency"]
            if scheduled:
                given["scheduler"] = schedule
            engine, _, loader, _ = initialize(model=net(), config=given, training_data=Numbers())
            if load:
                engine.load_checkpoint(folder, tag=load)
            rates = steps_of(loader, engine, 2 if load else 6)
            result[f"{tag}{' and changed' if load else ''}{' by schedule' if scheduled else ''}"] = [
                rate / 0.01 for rate in rates
            ]
            if not load:
                engine.save_checkpoint(folder, tag=tag)
            engine.destroy()
    return result


def test_budgets_are_switched_on_and_off_between_runs(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    (found,) = run_distributed(switched, 1, str(tmp_path), timeout=30)
    sizes = batch_by_seqlens(LENGTHS, BUDGET, effective_batch_size=BATCH)[1]
    assert found["on and changed"] == pytest.approx([1, 1])
    assert found["off and changed"] == pytest.approx([size / BATCH for size in sizes[:2]])  # the epoch begins anew
    plain = found["off by schedule"][-1]
    assert found["on and changed by schedule"] == pytest.approx([plain - 1 / 7, plain - 2 / 7])
    wanted = [(plain - (step + 1) / 7) * sizes[step] / BATCH for step in range(2)]
    assert found["off and changed by schedule"] == pytest.approx(wanted)


def one_process(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in (("missing", {"metrics_path": None}), ("short", {"metrics_path": f"{folder}/short.npy"})):
        with pytest.raises(ConfigError) as caught:
            initialize(model=net(), config=settings(folder, 0, **changes), training_data=Numbers())
        found[name] = str(caught.value)
    engine, *_ = initialize(model=net(), config=settings(folder, 0))
    logging.getLogger("ds_hf").addHandler(lines := logging.handlers.BufferingHandler(9))
    engine(torch.zeros(1, 2))
    found["untaken"] = [line.getMessage() for line in lines.buffer]
    engine.destroy()
    engine, *_ = initialize(model=net(), config=settings(folder, 0, lr_scaling_method="none"))
    loader, schedule, _ = make(Numbers(), engine, batch_seqlens_fn=lambda rows: [int(row[1] * 20) for row in rows])
    packs, *_ = batch_by_seqlens(LENGTHS, BUDGET, effective_batch_size=BATCH)
    found["batches"] = loader.packs == [pack for _, pack in packs]
    found["rate"] = schedule
    found["length"] = len(list(loader)) == len(loader)
    engine.destroy()
    return found


def test_lengths_that_are_no_lengths_are_named(tmp_path: Path) -> None:
    for name, strange in (("nan", np.nan), ("negative", -1.0)):
        np.save(tmp_path / f"{name}.npy", np.array([3.0, strange, 2.0]))
        with pytest.raises(ConfigError, match=rf"{name}.npy has 1 lengths that are negative or not finite"):
            lengths_of(f"{tmp_path}/{name}.npy", 3)


def test_lengths_that_do_not_fit_and_a_loader_of_a_script(tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", np.array(LENGTHS[:5]))
    (found,) = run_distributed(one_process, 1, str(tmp_path), timeout=30)
    assert "no file of lengths is named" in found["missing"]
    assert "has the lengths of 5 samples, and the data set has 61" in found["short"]
    assert found["batches"]
    assert found["length"]
    assert found["rate"] is None
    assert ["nothing makes its batches" in line for line in found["untaken"]] == [True]


def changed_by_call(folder: str) -> dict[str, list[str]]:
    """What is told where a script changes the engine's batch, by what chooses the samples."""
    np.save(f"{folder}/lengths.npy", np.array(LENGTHS))
    np.save(f"{folder}/hard.npy", np.arange(len(LENGTHS)))
    budgets = settings(folder, 0)
    metrics = metrics_section(folder)["data_efficiency"]
    found = {}
    for name, data in (("budgets", budgets["data_efficiency"]), ("metrics", metrics), ("order", {})):
        model = net()
        given = {**budgets, "data_efficiency": data}
        engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=given, training_data=Numbers())
        forget_said()
        with logged() as told:
            engine.set_train_batch_size(2 * BATCH)
            engine.set_train_batch_size(BATCH)
            engine.set_train_micro_batch_size(3)
        found[name] = [line.split(" samples")[0] for line in told]
        engine.destroy()
    return found


def test_a_batch_that_a_script_changes_is_told_where_a_loader_goes_on_with_the_older(tmp_path: Path) -> None:
    (found,) = run_distributed(changed_by_call, 1, str(tmp_path))
    micro = "the loader of training_data goes on with micro-batches of 1"
    rates = "dynamic_batching scales the rate of each step by the"
    assert found == {
        "budgets": [rates, micro, rates],
        "metrics": ["metrics go on drawing 4", micro, "metrics go on drawing 4"],
        "order": [micro],
    }
