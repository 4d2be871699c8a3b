"""``Accelerator.prepare`` with every kind of optimizer and scheduler, and the loop that its documentation shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DummyOptim, DummyScheduler

from tests.compat.accelerate_user import LR, MICRO, Regressor, fresh_start, loader, plain_training, train
from tests.compat.common import WORLD, run_user_code

STAGES = (0, 1, 2, 3)
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}
STEPS = 8


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        **copy.deepcopy(more),
    }


def decay(step: int) -> float:
    return 1.0 - step / (4 * STEPS)


def train_once(stage: int, sections: dict[str, Any], dummy_optimizer: bool, schedule: str) -> dict[str, Any]:
    """One run of the loop; what the user can see of it."""
    fresh_start()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage, **sections)))
    model = Regressor()
    batches = loader(STEPS * MICRO * accelerator.num_processes)
    optimizer: Any
    if dummy_optimizer:
        optimizer = DummyOptim(model.parameters(), lr=LR, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    scheduler: Any
    if schedule == "config":
        total = 4 * STEPS * accelerator.num_processes  # accelerate divides it by the number of processes
        scheduler = DummyScheduler(optimizer, total_num_steps=total, warmup_num_steps=4)
    elif schedule == "callable":
        scheduler = DummyScheduler(
            optimizer, lr_scheduler_callable=lambda inner: torch.optim.lr_scheduler.LambdaLR(inner, decay)
        )
    else:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    prepared = accelerator.prepare(model, optimizer, batches, scheduler)
    rows = train(accelerator, *prepared[:2], prepared[3], prepared[2])
    state = accelerator.get_state_dict(prepared[0])
    return {
        "rows": rows,
        "types": [type(prepared[1]).__name__, type(prepared[3]).__name__],
        "same": accelerator.unwrap_model(prepared[0]) is model,
        "wrapped": isinstance(prepared[1], AcceleratedOptimizer) and isinstance(prepared[3], AcceleratedScheduler),
        "weights": {name: value.cpu() for name, value in state.items()} if accelerator.is_main_process else None,
        "processes": accelerator.num_processes,
        "config": {key: accelerator.deepspeed_config[key] for key in ("train_batch_size", "steps_per_print")},
    }


def all_combinations(stages: tuple[int, ...]) -> dict[str, Any]:
    found = {}
    both = {"optimizer": OPTIMIZER, "scheduler": WARMUP}
    for stage in stages:
        found[f"{stage} real real"] = train_once(stage, {}, False, "real")
        found[f"{stage} dummy config"] = train_once(stage, both, True, "config")
        found[f"{stage} real config"] = train_once(stage, {"scheduler": WARMUP}, False, "config")
        found[f"{stage} dummy callable"] = train_once(stage, {"optimizer": OPTIMIZER}, True, "callable")
    fresh_start()
    return found


def lrs_used(rows: list[dict[str, Any]], schedule: str, processes: int) -> list[float]:
    """The learning rate that each step was made with."""
    after = [row["lr"] for row in rows]
    if schedule == "real":  # accelerate steps the user's scheduler once for each process
        return [LR * decay(processes * step) for step in range(STEPS)]
    if schedule == "callable":
        return [LR * decay(step) for step in range(STEPS)]
    first = after[0] if schedule == "config" else LR
    return [first, *after[:-1]]


@pytest.mark.feature("accelerate", "prepare() with real and dummy optimizers and schedulers, all four combinations")
def test_every_combination_of_optimizer_and_scheduler_trains_like_torch() -> None:
    results = run_user_code(all_combinations, STAGES)
    plain = {}
    for name, found in results[0].items():
        schedule = name.split()[2]
        assert found["same"]
        assert found["wrapped"]
        assert found["processes"] == WORLD
        assert found["config"]["train_batch_size"] == MICRO * WORLD
        expected_scheduler = "AcceleratedScheduler" if schedule == "real" else "DeepSpeedSchedulerWrapper"
        assert found["types"] == ["DeepSpeedOptimizerWrapper", expected_scheduler]
        if schedule == "config":
            # linear warm-up over 4 steps, as DeepSpeed steps it: the first two steps stand at the minimum
            assert [row["lr"] for row in found["rows"]][:5] == pytest.approx([0, LR / 4, LR / 2, LR * 3 / 4, LR])
        else:
            assert found["rows"][-1]["lr"] == pytest.approx(LR * decay(STEPS * (WORLD if schedule == "real" else 1)))
        used = lrs_used(found["rows"], schedule, WORLD)
        key = tuple(used)
        plain[key] = plain.get(key) or plain_training(WORLD, STEPS * MICRO * WORLD, lrs=used)
        rows, weights = plain[key]
        assert [row["loss"] for row in found["rows"]] == pytest.approx([row["loss"] for row in rows], rel=1e-5), name
        assert [row["norm"] for row in found["rows"]] == pytest.approx([row["norm"] for row in rows], rel=1e-5), name
        for parameter, value in weights.items():
            torch.testing.assert_close(found["weights"][parameter], value, rtol=1e-5, atol=1e-6)
    assert all(result["0 real real"]["weights"] is None for result in results[1:])


def refusals() -> dict[str, str]:
    """What accelerate says to a wrong pair of optimizer and scheduler."""
    sections = {"optimizer": OPTIMIZER, "scheduler": WARMUP}
    cases: dict[str, tuple[dict[str, Any], bool, str]] = {
        "real optimizer beside the file's": (sections, False, "config"),
        "real scheduler beside the file's": (sections, True, "real"),
        "dummy optimizer without the file's": ({}, True, "real"),
        "dummy scheduler without the file's": ({}, False, "config"),
        "dummy optimizer with a real scheduler": ({"optimizer": OPTIMIZER}, True, "lambda"),
    }
    found = {}
    for name, (given, dummy, schedule) in cases.items():
        fresh_start()
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(2, **given)))
        model = Regressor()
        real = torch.optim.AdamW(model.parameters(), lr=LR)
        optimizer = DummyOptim(model.parameters(), lr=LR) if dummy else real
        real_scheduler = torch.optim.lr_scheduler.LambdaLR(real, decay)
        scheduler = DummyScheduler(optimizer, total_num_steps=8) if schedule == "config" else real_scheduler
        with pytest.raises(ValueError) as caught:
            accelerator.prepare(model, optimizer, loader(8), scheduler)
        found[name] = str(caught.value)
        # the refusal leaves no trace: the right pair is taken by the same Accelerator
        right = DummyOptim(model.parameters(), lr=LR) if "optimizer" in given else real
        pair: list[Any] = [DummyScheduler(right, total_num_steps=8)] if "scheduler" in given else []
        prepared = accelerator.prepare(model, right, loader(8), *pair)
        assert type(prepared[1]).__name__ == "DeepSpeedOptimizerWrapper"
    fresh_start()
    return found


@pytest.mark.feature("accelerate", "prepare(): wrong pairs of optimizer and scheduler are refused")
def test_wrong_pairs_get_the_sentences_of_accelerate() -> None:
    said = run_user_code(refusals)[0]
    assert "cannot specify an optimizer in the config file and in the code" in said["real optimizer beside the file's"]
    assert "cannot specify a scheduler in the config file and in the code" in said["real scheduler beside the file's"]
    assert "cannot create a `DummyOptim` without" in said["dummy optimizer without the file's"]
    assert "Either specify a scheduler in the config file or" in said["dummy scheduler without the file's"]
    assert "can only specify `accelerate.utils.DummyScheduler`" in said["dummy optimizer with a real scheduler"]


def accumulate(stages: tuple[int, ...], steps: int, micro_batches: int, given_to: str) -> dict[int, Any]:
    found = {}
    for stage in stages:
        fresh_start()
        settings = config(stage)
        if given_to == "file":
            settings["gradient_accumulation_steps"] = steps
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
            gradient_accumulation_steps=steps if given_to == "Accelerator" else 1,
        )
        model = Regressor()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        batches = loader(micro_batches * MICRO * accelerator.num_processes)
        prepared: Any = accelerator.prepare(model, optimizer, batches)
        rows = train(accelerator, prepared[0], prepared[1], None, prepared[2])
        state = accelerator.get_state_dict(prepared[0])
        found[stage] = (rows, {k: v.cpu() for k, v in state.items()} if state else {}, prepared[0].global_steps)
    fresh_start()
    return found


@pytest.mark.feature("accelerate", "accumulate(), with a last group that is not full", pain="P27")
@pytest.mark.feature("accelerate", "clip_grad_norm_() returns the norm before clipping", pain="P30")
@pytest.mark.parametrize("given_to", ["Accelerator", "file"])
def test_accumulation_with_a_short_last_group_equals_torch(given_to: str) -> None:
    found = run_user_code(accumulate, STAGES, 3, 8, given_to)[0]
    rows, weights = plain_training(WORLD, 8 * MICRO * WORLD, accumulation=3)
    for stage in STAGES:
        ours, state, steps = found[stage]
        assert steps == 3  # micro-batches 3, 6 and 8
        assert [row["norm"] is None for row in ours] == [row["norm"] is None for row in rows]
        assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in rows], rel=1e-5), stage
        norms = [[row["norm"] for row in which if row["norm"] is not None] for which in (ours, rows)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5), stage
        for name, value in weights.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
