"""``LrFinderCallback``: before a Trainer trains, find a learning rate with its own model, data, loss and optimizer.

    trainer = Trainer(...)  # with --deepspeed
    trainer.add_callback(LrFinderCallback(trainer))
    trainer.train()

The search leaves no trace but the rate: weights, moments, random states and the order of the data are what they were.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from ds_hf.deepspeed_api.engine import Engine
from ds_hf.engine.observe.probes.learning_rate.feeding import range_test
from ds_hf.engine.optim.schedules.policies import OneCycle, Schedule
from ds_hf.errors import DsHfError
from ds_hf.log import logger
from ds_hf.lr import LrOptions, LrResult
from ds_hf.regular_files import replace_file

__all__ = ["LrFinderCallback"]

RESULT = "lr_result.json"


class LrFinderCallback(TrainerCallback):
    """Search when training begins; ``result`` has everything afterwards, and so has ``lr_result.json``.

    Args:
        trainer: whose batches and loss are used.
        options: see ``ds_hf.lr.LrOptions``; ``changes`` to single ones of them.
        apply: train with what was found; the schedule keeps its shape. Not when training resumes.
    """

    def __init__(self, trainer: Trainer, options: LrOptions | None = None, apply: bool = True, **changes: Any) -> None:
        self.trainer = trainer
        self.options = replace(options or LrOptions(), **changes)
        self.apply = apply
        self.result: LrResult | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Search; the Trainer calls it.

        Raises:
            DsHfError: the Trainer does not train with ds_hf, or the search fails.
        """
        engine = self.trainer.deepspeed
        if not isinstance(engine, Engine):
            raise DsHfError(
                "LrFinderCallback needs an engine: train with --deepspeed, or with deepspeed= in the arguments"
            )
        if state.global_step:
            logger.warning("training resumes at step %d: the search for a learning rate is skipped", state.global_step)
            return
        options = self.options
        if options.total_steps is None and state.max_steps > 0:
            options = replace(options, total_steps=state.max_steps)
        wanted = options.batches * engine.gradient_accumulation_steps()
        batches = list(islice(kwargs["train_dataloader"], wanted))
        self.result = range_test(engine, batches, None, self._loss, options)
        if self.apply:
            scale_rates(engine, kwargs.get("lr_scheduler"), self.result.lr)
            args.learning_rate = self.result.lr
        if self.trainer.is_world_process_zero():
            said = "; ".join((self.result.reason, *self.result.notes))
            logger.warning("learning rate %.3g: %s", self.result.lr, said)
            folder = Path(args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / RESULT, json.dumps(self.result.to_dict(), indent=1) + "\n")

    def _loss(self, engine: Any, batch: Any) -> Any:
        inputs = self.trainer._prepare_inputs(batch)
        with self.trainer.compute_loss_context_manager():
            return self.trainer.compute_loss(engine, inputs)


def scale_rates(engine: Engine, schedule: Any, lr: float) -> None:
    """Let the engine's schedule, or else the Trainer's, peak at ``lr``; groups keep their ratios.

    Raises:
        DsHfError: its present peak is 0, or it is a schedule of an unknown kind.
    """
    assert engine.optimizer is not None
    groups = engine.optimizer.param_groups
    if engine.lr_scheduler is not None:
        schedule = engine.lr_scheduler
    peaks = _peaks(schedule, groups)
    largest = max(peaks)
    if largest <= 0:
        raise DsHfError("the learning rates of the schedule are all 0: nothing to scale")
    factor = lr / largest
    if isinstance(schedule, Schedule):
        names = ("max_lrs", "min_lrs") if isinstance(schedule, OneCycle) else ("max_lrs", "org_lrs")
        for name in names:
            if hasattr(schedule, name):
                setattr(schedule, name, [value * factor for value in getattr(schedule, name)])
    elif schedule is not None:
        schedule.base_lrs = [value * factor for value in schedule.base_lrs]
    for group in groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * factor


def _peaks(schedule: Any, groups: list[dict[str, Any]]) -> list[float]:
    for name in ("max_lrs", "org_lrs", "base_lrs"):
        if hasattr(schedule, name):
            return list(getattr(schedule, name))
    if schedule is not None:
        raise DsHfError(f"the rate of a {type(schedule).__name__} cannot be changed: use apply=False")
    return [float(group["lr"]) for group in groups]
