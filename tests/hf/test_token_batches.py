"""Batches of a budget of tokens in the Trainer and in accelerate's loop, against the same batches without DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from ds_hf.errors import ConfigError
from tests.compat.common import largest_difference, run_user_code
from tests.compat.trainer_code import TOLERANCE, config, history, make_trainer, start_afresh, tiny_llama
from tests.compression.common import logged
from tests.hf.test_sampling import Uneven, pad

DATA = Uneven()
LENGTHS = [len(DATA[index]["input_ids"]) for index in range(len(DATA))]
BUDGET, ACCUMULATION, WORLD, STEPS, RATE = 45, 2, 2, 7, 5e-3
BATCH = ACCUMULATION * WORLD
GIVEN = {"train_dataset": DATA, "eval_dataset": torch.utils.data.Subset(DATA, range(9)), "data_collator": pad}
ADAM = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
LINEAR = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": "auto", "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}


def by_hand(batch: int = BATCH) -> tuple[list[list[int]], list[int]]:
    """Packs in the order of the data, each as far as the budget goes; whole batches of them, and their samples."""
    packs: list[list[int]] = [[]]
    for index, length in enumerate(LENGTHS):
        if sum(LENGTHS[each] for each in packs[-1]) + length > BUDGET:
            packs.append([])
        packs[-1].append(index)
    packs = packs[: len(packs) // batch * batch]
    return packs, [sum(map(len, packs[start : start + batch])) for start in range(0, len(packs), batch)]


PACKS, SIZES = by_hand()


def section(**changes: Any) -> dict[str, Any]:
    budget = {"enabled": True, "max_tokens": BUDGET, **changes}
    return {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": budget}}


class ByHand(Trainer):
    """One process that takes the packs as they are."""

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(DataLoader(self.train_dataset, batch_sampler=PACKS, collate_fn=pad))


COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 9,
    "learning_rate": RATE,
    "weight_decay": 0.1,
}


def plain(folder: str) -> tuple[list[dict[str, float]], float]:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)

    def factor(step: int) -> float:
        return (STEPS - step) / STEPS * SIZES[step % len(SIZES)] / BATCH

    given = {**GIVEN, "model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor))}
    accumulation = {"gradient_accumulation_steps": BATCH}
    trainer = make_trainer(folder, trainer_class=ByHand, trainer_arguments=given, **COMMON, **accumulation)
    trainer.train()
    return history(trainer), trainer.state.epoch


def budgeted(folder: str, stage: int, **more: Any) -> tuple[list[dict[str, float]], float, list[float], list[str]]:
    """Trained once from start to end, and twice from the fourth step on, which is inside of the second epoch: the last
    time with batches of half as many packs, of which the rates are given, and what is told."""
    whole: list[dict[str, float]] = []
    rates: list[float] = []
    told: list[str] = []
    for resume, accumulation in ((None, ACCUMULATION), ("checkpoint-4", ACCUMULATION), ("checkpoint-4", 1)):
        trainer = make_trainer(
            folder,
            config(stage, data_efficiency=section(**more)),
            trainer_arguments=GIVEN,
            **COMMON,
            gradient_accumulation_steps=accumulation,
            **({} if resume else {"save_strategy": "steps", "save_steps": 4}),
        )
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=RATE, weight_decay=0.1)
        trainer.optimizer = optimizer
        with logged() as lines:
            trainer.train(resume_from_checkpoint=resume and f"{folder}/{resume}")
        found = history(trainer)
        told += [f"{accumulation}: {line}" for line in lines if "batches of the checkpoint" in line]
        if accumulation == 1:
            rates = [row["learning_rate"] for row in found if "loss" in row][4:]
            break
        assert not resume or largest_difference(found, whole) <= 1e-6
        whole, epoch = found, trainer.state.epoch
    return whole, epoch, rates, told


@pytest.mark.parametrize(
    "stage", [0, 3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_the_trainer_takes_batches_of_tokens_and_scales_rates(tmp_path: Path, stage: int) -> None:
    assert len(SIZES) == 3
    assert len(set(SIZES)) == 3
    ((wanted, epoch),) = run_user_code(plain, str(tmp_path / "plain"), world_size=1)
    assert len(wanted) == STEPS + 3  # three evaluations
    _, sizes = by_hand(WORLD)
    passed = SIZES[0] + sum(SIZES), sum(sizes[step % len(sizes)] for step in range(4))
    found_by = run_user_code(budgeted, str(tmp_path / "ours"), stage, world_size=WORLD)
    assert [
        f"1: the 4 batches of the checkpoint had {passed[0]} samples, and as many have {passed[1]} now" in line
        for line in found_by[0][3]
    ] == [True]
    for found, reached, rates, _ in found_by:
        after = [(STEPS - step) / STEPS * sizes[step % len(sizes)] / WORLD for step in range(4, STEPS)]
        assert rates == pytest.approx([RATE * each for each in after])
        assert largest_difference(found, wanted) <= TOLERANCE
        assert reached == epoch == pytest.approx(STEPS / len(SIZES))


def scheduled_by_the_engine(folder: str) -> list[list[float]]:
    """The rate of each step: of a schedule that the engine steps, whose file names it and the optimizer."""
    rates: list[list[float]] = []
    for method in ("linear", "sqrt", "none"):
        given = config(2, data_efficiency=section(lr_scaling_method=method), optimizer=ADAM, scheduler=LINEAR)
        trainer = make_trainer(
            folder, given, trainer_arguments=GIVEN, **COMMON, gradient_accumulation_steps=ACCUMULATION, warmup_steps=2
        )
        rates.append([])
        inner = trainer.training_step

        def note(*args: Any, inner: Any = inner, trainer: Any = trainer) -> Any:
            rates[-1].append(trainer.deepspeed.get_lr()[0])
            return inner(*args)

        trainer.training_step = note
        trainer.train()
    return rates


def test_the_engines_own_schedule_follows_as_well(tmp_path: Path) -> None:
    for linear, root, plain in run_user_code(scheduled_by_the_engine, str(tmp_path), world_size=WORLD):
        assert len(plain) == STEPS * ACCUMULATION
        assert plain[::2] == plain[1::2]
        sizes = [SIZES[step % len(SIZES)] / BATCH for step in range(STEPS)]
        assert linear[::2] == pytest.approx([rate * size for rate, size in zip(plain[::2], sizes, strict=True)])
        assert root[::2] == pytest.approx([rate * size**0.5 for rate, size in zip(plain[::2], sizes, strict=True)])


# -- accelerate's loop ------------------------------------------------------------------------------------------------


def loop(folder: str, stage: int) -> list[float]:
    """Losses of each step and their rates, of one run and of one that goes on from the third step."""
    found: list[float] = []
    for first in (0, 3):
        start_afresh()
        given = {
            **config(stage, data_efficiency=section()),
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
        }
        given["gradient_accumulation_steps"] = ACCUMULATION
        plugin = DeepSpeedPlugin(hf_ds_config=given)
        accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // WORLD))
        batches = DataLoader(DATA, batch_size=1, shuffle=True, collate_fn=pad)
        held_out = DataLoader(DATA, batch_size=2, collate_fn=pad)
        model, optimizer, batches, held_out, scheduler = accelerator.prepare(
            model, optimizer, batches, held_out, scheduler
        )
        assert len(batches) == len(PACKS) // WORLD
        assert len(held_out) == len(DATA) // 2 // WORLD
        if first:
            accelerator.load_state(f"{folder}/state{stage}")
        step, losses = first, []
        while step < STEPS:
            for place, batch in enumerate(batches):
                if step >= STEPS:
                    break
                if first and step == first and place < first % len(SIZES) * ACCUMULATION:
                    continue
                with accelerator.accumulate(model):
                    rate = model.get_lr()[0]
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                if accelerator.sync_gradients:
                    row = [sum(losses) / ACCUMULATION, rate]
                    step, losses = step + 1, []
                    if first:
                        assert found[2 * step - 2 : 2 * step] == pytest.approx(row, abs=1e-6)
                    else:
                        found += row
                    if step == 3 and not first:
                        accelerator.save_state(f"{folder}/state{stage}")
    return found


def loop_by_hand() -> list[float]:
    torch.manual_seed(0)
    model, found = tiny_llama(), []
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    for step in range(STEPS):
        place = step % len(SIZES)
        rate = optimizer.param_groups[0]["lr"] = RATE * 0.5**step * SIZES[place] / BATCH
        losses = [model(**pad([DATA[each] for each in pack])).loss for pack in PACKS[place * BATCH :][:BATCH]]
        optimizer.zero_grad()
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        found += [loss.item(), rate]
    return found


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_accelerates_loop_takes_them_from_the_loader_that_shuffles(tmp_path: Path, stage: int) -> None:
    wanted = loop_by_hand()
    for found in run_user_code(loop, str(tmp_path), stage, world_size=WORLD):
        assert found == pytest.approx(wanted, abs=TOLERANCE)


# -- what cannot be ---------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (DATA[index] for index in range(len(DATA)))


class Nameless(Uneven):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": [1, 2]}


def refusals(folder: str) -> dict[str, str]:
    np.save(f"{folder}/short.npy", np.array(LENGTHS[:5]))
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], type[Trainer]]] = {
        "rebalance": ({"train_sampling_strategy": "batch_rebalance"}, {}, {}, Trainer),
        "order": ({"train_sampling_strategy": "sequential"}, {}, {"sequence_picking_order": "random"}, Trainer),
        "stream": ({}, {"train_dataset": Stream()}, {}, Trainer),
        "nameless": ({}, {"train_dataset": Nameless()}, {}, Trainer),
        "short": ({}, {}, {"metrics_path": f"{folder}/short.npy"}, Trainer),
        "own": ({}, {}, {}, ByHand),
        "plateau": ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, {}, Trainer),
        "split": ({"accelerator_config": {"split_batches": True}}, {}, {}, Trainer),
    }
    found = {}
    for name, (arguments, given, changes, kind) in cases.items():
        trainer = make_trainer(
            folder,
            config(0, data_efficiency=section(**changes)),
            trainer_class=kind,
            trainer_arguments={**GIVEN, **given},
            **{**COMMON, **arguments},
        )
        with pytest.raises(ConfigError) as caught:
            trainer.train()
        found[name] = str(caught.value)
    start_afresh()
    file = {**config(0, data_efficiency=section()), "train_micro_batch_size_per_gpu": 1}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=file))
    model = tiny_llama()
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(DATA, batch_size=1))
    found["no loader"] = str(caught.value)
    return found


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    (found,) = run_user_code(refusals, str(tmp_path), world_size=1)
    words = {
        "rebalance": "train_sampling_strategy='batch_rebalance' makes batches by lengths as well",
        "order": "takes samples as they come",
        "stream": "Stream has no lengths before it is read",
        "nameless": "samples have no input_ids to count",
        "short": "has the lengths of 5 samples, and the data set has 40",
        "own": "ByHand makes its batches itself",
        "plateau": "ReduceLROnPlateau changes the rates that it finds",
        "split": "split_batches divides a batch by samples",
        "no loader": "a loader that shuffles, and none has been prepared",
    }
    assert sorted(words) == sorted(found)
    for name, word in words.items():
        assert word in found[name]
