"""``hyperparameter_search``: trials one after another in one process, each with its own engine, memory flat."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import TrainerCallback

from tests.compat.common import run_user_code
from tests.compat.trainer_code import config, fit, make_trainer, tiny_llama

TRIALS = 20
WARM = 4  # trials after which nothing new is loaded any more


def space(trial: Any) -> dict[str, Any]:
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        "per_device_train_batch_size": trial.suggest_categorical("per_device_train_batch_size", [1, 2, 4]),
        "gradient_accumulation_steps": trial.suggest_int("gradient_accumulation_steps", 1, 3),
        "weight_decay": trial.suggest_float("weight_decay", 0.0, 0.3),
    }


class Witness(TrainerCallback):
    """What each trial really trained with, and what it left in memory."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.used: list[tuple[Any, ...]] = []
        self.tensors: list[int] = []
        self.resident: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            engine = self.trainer.deepspeed
            group = engine.optimizer.param_groups[0]
            asked = (args.learning_rate, args.per_device_train_batch_size, args.gradient_accumulation_steps)
            base = group.get("initial_lr", group["lr"])
            self.used.append((asked, (base, *engine.get_batch_info()[1:]), group["weight_decay"]))

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        gc.collect()
        self.tensors.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        self.resident.append(psutil.Process().memory_info().rss)


def search(folder: Path, stage: int, named: bool) -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    gc.freeze()  # what was imported before: the Trainer collects garbage at every trial
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    deepspeed = config(stage, **({"optimizer": {"type": "AdamW", "params": params}} if named else {}))
    witness = Witness()
    more = {"eval_strategy": "no", "save_strategy": "no", "max_steps": 2, "lr_scheduler_type": "constant"}
    given = {"model_init": lambda trial: tiny_llama(), "callbacks": [witness]}
    witness.trainer = trainer = make_trainer(folder, deepspeed, trainer_arguments=given, **more)
    sampler = optuna.samplers.RandomSampler(seed=0)
    best = trainer.hyperparameter_search(
        hp_space=space, backend="optuna", n_trials=TRIALS, direction="minimize", sampler=sampler
    )
    return witness.used, witness.tensors, witness.resident, best


@pytest.mark.slow
@pytest.mark.feature("Trainer", "`hyperparameter_search` with Optuna, 20 trials in one process, flat memory", pain="P9")
@pytest.mark.parametrize(
    ("stage", "named"),
    [(3, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(0, True, marks=pytest.mark.slow)],
)
def test_every_trial_has_its_own_settings_on_every_rank_and_leaves_nothing(
    stage: int, named: bool, tmp_path: Path
) -> None:
    results = run_user_code(search, tmp_path, stage, named, timeout=110)
    for used, tensors, resident, _ in results:
        assert used == results[0][0]  # not rank 0's alone
        assert len({asked for asked, *_ in used}) > TRIALS // 2
        for asked, got, _ in used:
            assert asked == got
        assert max(tensors[WARM:]) <= min(tensors[WARM:]) + 2
        assert max(resident[WARM:]) - resident[WARM] < 20 * 2**20
    best = results[0][3]
    assert 1e-4 <= best.hyperparameters["learning_rate"] <= 1e-2
    assert all(result[3] is None for result in results[1:])


def in_one_process(folder: Path) -> Any:
    return search(folder, 3, named=False)


@pytest.mark.slow
def test_search_in_one_process(tmp_path: Path) -> None:
    ((used, tensors, _, best),) = run_user_code(in_one_process, tmp_path, world_size=1, timeout=110)
    assert len(used) == TRIALS
    assert max(tensors[WARM:]) <= min(tensors[WARM:]) + 2
    assert best.run_id in {str(number) for number in range(TRIALS)}


def many_runs(folder: Path) -> Any:
    """A user's own loop over settings: a new Trainer each time."""
    losses, tensors = [], []
    for rate in (1e-3, 5e-3, 1e-3):
        losses.append([row["loss"] for row in fit(folder, config(3), learning_rate=rate)])
        gc.collect()
        tensors.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    return losses, tensors


@pytest.mark.slow
@pytest.mark.feature("Trainer", "several Trainers one after another in one process", pain="P8")
def test_trainers_one_after_another(tmp_path: Path) -> None:
    for losses, tensors in run_user_code(many_runs, tmp_path):
        assert losses[0] == losses[2] != losses[1]
        assert tensors[2] <= tensors[1] + 2
