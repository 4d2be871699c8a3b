"""Several models in one process, each with its own plugin: teacher and student, two models in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DummyOptim
from accelerate.utils.deepspeed import get_active_deepspeed_plugin
from torch import nn
from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

from ds_hf.config import load_config
from tests.compat.accelerate_user import (
    DEVICE,
    LR,
    MICRO,
    Regressor,
    fresh_start,
    loader,
    loss_of,
    plain_batches,
    plain_training,
)
from tests.compat.common import WORLD, run_user_code
from tests.compat.test_accelerate_prepare import OPTIMIZER, STAGES, config

STEPS = 6


def inference_config() -> dict[str, Any]:
    """As accelerate's guide has it for a model that only infers."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "bf16": {"enabled": False},
    }


def select() -> dict[str, Any]:
    """Which plugin is active, and what transformers then believes."""
    fresh_start()
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=config(2)),
        "teacher": DeepSpeedPlugin(hf_ds_config=inference_config()),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    seen = []
    for name in (None, "teacher", "student"):
        if name is not None:
            accelerator.state.select_deepspeed_plugin(name)
        active = get_active_deepspeed_plugin(accelerator.state)
        assert active is accelerator.deepspeed_plugin
        assert deepspeed_config()["zero_optimization"] == active.deepspeed_config["zero_optimization"]
        chosen = next(key for key, plugin in plugins.items() if plugin is active)
        seen.append((chosen, active.zero_stage, is_deepspeed_zero3_enabled()))
    with pytest.raises(NotImplementedError):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(1)))
    fresh_start()
    return {"seen": seen}


@pytest.mark.slow
@pytest.mark.feature("accelerate", "several plugins: select_deepspeed_plugin()", pain="P8")
def test_the_selected_plugin_is_the_one_that_counts() -> None:
    seen = run_user_code(select)[0]["seen"]
    assert seen == [("student", 2, False), ("teacher", 3, True), ("student", 2, False)]


def distil(dummy: bool, own: bool) -> dict[str, Any]:
    """Train a student at stage 2 on the outputs of a teacher at stage 3, two micro-batches a step; the teacher's file
    has no number of them, and nor has the Accelerator that prepares it, if it has its ``own``."""
    fresh_start()
    training = config(2, gradient_accumulation_steps=2, **({"optimizer": OPTIMIZER} if dummy else {}))
    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=training),
        "teacher": DeepSpeedPlugin(hf_ds_config=inference_config()),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    raw = Regressor(seed=0)
    optimizer: Any = torch.optim.AdamW(raw.parameters(), lr=LR, weight_decay=0.0)
    if dummy:
        optimizer = DummyOptim(raw.parameters(), lr=LR, weight_decay=0.0)
    student, optimizer, batches = accelerator.prepare(raw, optimizer, loader(STEPS * MICRO * accelerator.num_processes))

    accelerator.state.select_deepspeed_plugin("teacher")
    frozen = Regressor(seed=1)
    teacher = (Accelerator() if own else accelerator).prepare(frozen)
    teacher.eval()
    assert accelerator.deepspeed_engine_wrapped.engine is student
    accelerator.state.select_deepspeed_plugin("student")

    losses, asleep = [], []
    for x, _ in batches:
        with accelerator.accumulate(student):
            with torch.no_grad():
                target = teacher(x)
            loss = nn.functional.mse_loss(student(x), target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        asleep.append(sum(parameter.numel() for parameter in frozen.parameters()))
        losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
    accelerator.state.select_deepspeed_plugin("teacher")
    state = accelerator.get_state_dict(teacher)
    result = {"losses": losses, "asleep": asleep, "teacher": {k: v.cpu() for k, v in state.items()} if state else None}
    fresh_start()
    return result


@pytest.mark.feature("accelerate", "teacher at stage 3 (inference) and student at stage 2 in one process", pain="P8")
@pytest.mark.parametrize(
    ("dummy", "own"),
    [pytest.param(False, False, marks=pytest.mark.slow), (True, False), (False, True)],
    ids=["torch-AdamW", "DummyOptim", "its own Accelerator"],
)
def test_a_student_learns_from_a_sharded_teacher(dummy: bool, own: bool) -> None:
    found = run_user_code(distil, dummy, own)[0]
    student, teacher = Regressor(seed=0).to(DEVICE), Regressor(seed=1).to(DEVICE)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.0)
    expected = []
    for index, (x, _) in enumerate(plain_batches(WORLD, STEPS * MICRO * WORLD)):
        loss = nn.functional.mse_loss(student(x), teacher(x).detach())
        (loss / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    assert found["losses"] == pytest.approx(expected, rel=1e-5)
    assert found["asleep"] == [0] * STEPS  # between the steps each rank holds its shard of the teacher only
    for name, value in teacher.state_dict().items():
        assert torch.equal(found["teacher"][name], value.cpu()), name


def two_in_training(first: int, second: int) -> dict[str, Any]:
    """Two models, two Accelerators, two stages; one loop, with one backward of each."""
    fresh_start()
    plugins = {
        "one": DeepSpeedPlugin(hf_ds_config=config(first)),
        "two": DeepSpeedPlugin(hf_ds_config=config(second)),
    }
    one = Accelerator(deepspeed_plugins=plugins)
    two = Accelerator()
    raw = (Regressor(seed=0), Regressor(seed=1))
    optimizers: list[Any] = [torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.0) for m in raw]
    schedulers = [torch.optim.lr_scheduler.ConstantLR(o, 1.0) for o in optimizers]
    left, optimizers[0], schedulers[0], batches = one.prepare(
        raw[0], optimizers[0], schedulers[0], loader(STEPS * MICRO * one.num_processes)
    )
    two.state.select_deepspeed_plugin("two")
    micro = plugins["one"].deepspeed_config["train_micro_batch_size_per_gpu"]
    plugins["two"].deepspeed_config["train_micro_batch_size_per_gpu"] = micro
    right, optimizers[1], schedulers[1] = two.prepare(raw[1], optimizers[1], schedulers[1])
    assert one.deepspeed_engine_wrapped.engine is left
    assert two.deepspeed_engine_wrapped.engine is right
    losses = []
    for batch in batches:
        with one.accumulate(left, right):
            row = []
            for accelerator, model, optimizer, scheduler in zip(
                (one, two), (left, right), optimizers, schedulers, strict=True
            ):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                row.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
            losses.append(row)
    fresh_start()
    return {"losses": losses}


@pytest.mark.feature("accelerate", "two Accelerators, two models in training at different stages", pain="P8")
@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (0, 1)])
def test_two_models_train_side_by_side(first: int, second: int) -> None:
    found = run_user_code(two_in_training, first, second)[0]
    for index, seed in enumerate((0, 1)):
        model = Regressor(seed).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        expected = []
        for batch in plain_batches(WORLD, STEPS * MICRO * WORLD):
            loss = loss_of(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.item())
        assert [row[index] for row in found["losses"]] == pytest.approx(expected, rel=1e-5)


def plugin_options() -> dict[str, Any]:
    """DeepSpeedPlugin without a file."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        fresh_start()
        plugin = DeepSpeedPlugin(
            gradient_accumulation_steps=2,
            gradient_clipping=0.5,
            zero_stage=stage,
            offload_optimizer_device="cpu" if stage >= 2 else "none",
            offload_param_device="cpu" if stage >= 2 else "none",
            zero3_save_16bit_model=True,
            zero3_init_flag=stage == 3,
        )
        accelerator = Accelerator(deepspeed_plugin=plugin)
        model = Regressor()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        batches = loader(4 * MICRO * accelerator.num_processes)
        engine, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        losses = []
        for batch in batches:
            with accelerator.accumulate(engine):
                loss = loss_of(engine, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
        found[str(stage)] = (losses, engine.get_batch_info(), engine.gradient_clipping(), engine.global_steps)
    fresh_start()
    return found


@pytest.mark.feature("accelerate", "DeepSpeedPlugin(zero_stage=, offload_*=, gradient_*=) without a file")
def test_a_plugin_without_a_file() -> None:
    found = run_user_code(plugin_options)[0]
    rows, _ = plain_training(WORLD, 4 * MICRO * WORLD, accumulation=2, clip=0.5)
    for stage in STAGES:
        losses, batch, clipping, steps = found[str(stage)]
        assert batch == (MICRO * 2 * WORLD, MICRO, 2)
        assert clipping == 0.5
        assert steps == 2
        assert losses == pytest.approx([row["loss"] for row in rows], rel=1e-5), stage


def test_what_the_engine_chooses_stays_auto() -> None:
    """accelerate refuses an "auto" that it has no value for, and the engine has one."""
    fresh_start()
    zero = {
        "stage": 3,
        "sub_group_size": "auto",
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"update_interval": "auto", "select_interval": "auto"},
    }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": zero,
        "ds_hf": {"split_masters": "auto"},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=settings)
    plugin.deepspeed_config_process(must_match=False, gradient_clipping=1.0)
    config = load_config(plugin.deepspeed_config, world_size=1)
    assert config.zero_optimization.zenflow is not None
    assert config.zero_optimization.zenflow.update_interval == "auto"
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    with pytest.raises(ValueError, match=r"optimizer\.params\.lr"):
        DeepSpeedPlugin(hf_ds_config=settings).deepspeed_config_process(must_match=False, gradient_clipping=1.0)
    fresh_start()
