"""``auto_find_batch_size``: real allocations that cannot succeed, at every stage, on all ranks or on one alone."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from ds_hf.log import logger
from tests.compat.common import WORLD, largest_difference, run_user_code
from tests.compat.trainer_code import STAGES, TOLERANCE, config, fit, history, make_trainer
from tests.helpers.logs import Lines

FITS = 2  # samples of a micro-batch
HUGE = 1 << 60  # bytes that no machine has


class Hungry(Trainer):
    """Asks for too much memory in the midst of the last block when a batch is larger than ``FITS``."""

    where = "forward"
    only_rank: int | None = None

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        block = self.model.model.layers[-1].mlp
        hooks = {"forward": block.register_forward_hook, "backward": block.register_full_backward_hook}
        handle = None
        if len(inputs["input_ids"]) > FITS and self.only_rank in (None, self.args.process_index):
            handle = hooks[self.where](lambda *_: void(torch.empty(HUGE, dtype=torch.uint8, device=self.args.device)))
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()


def void(_: Any) -> None:
    """A hook that returns nothing."""


def find(folder: Path, stage: int, only_rank: int | None) -> Any:
    """Batch sizes that were found, and what was logged beside what the size that fits logs."""
    gc.freeze()  # what was imported before: the Trainer collects garbage at every attempt
    results = []
    for where in ("forward", "backward"):
        Hungry.where, Hungry.only_rank = where, only_rank
        more = {"auto_find_batch_size": True, "gradient_accumulation_steps": 2, "trainer_class": Hungry}
        trainer = make_trainer(folder, config(stage), per_device_train_batch_size=FITS + 1, **more)
        trainer.train()
        results.append((trainer.deepspeed.get_batch_info(), history(trainer)))
    return results, fit(folder, config(stage), per_device_train_batch_size=FITS, gradient_accumulation_steps=2)


@pytest.mark.feature("Trainer", "`auto_find_batch_size`, out of memory on all ranks or on one", pain="P10")
@pytest.mark.parametrize(
    ("stage", "only_rank"),
    [
        pytest.param(stage, rank, marks=() if (stage, rank) == (3, WORLD - 1) else pytest.mark.slow)
        for stage in STAGES
        for rank in (None, WORLD - 1)
    ],
)
def test_batch_size_is_lowered_until_it_fits(stage: int, only_rank: int | None, tmp_path: Path) -> None:
    """As without DeepSpeed the steps of accumulation stay as they were, so the global batch shrinks."""
    for results, expected in run_user_code(find, tmp_path, stage, only_rank, timeout=60):
        for batch, logged in results:
            assert batch == (FITS * 2 * WORLD, FITS, 2)
            assert largest_difference(logged, expected) <= TOLERANCE


class Later(Trainer):
    """Runs out of memory in its second step."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(inputs["input_ids"]) > FITS and self.state.global_step:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


def find_later(folder: Path) -> tuple[list[str], Any]:
    lines = Lines()
    logger.addHandler(lines)
    more = {"auto_find_batch_size": True, "trainer_class": Later, "per_device_train_batch_size": FITS + 1}
    trainer = make_trainer(folder, config(2), **more)
    trainer.train()
    found = [text for text in lines.texts if "out of memory after 1 steps" in text and "without the moments" in text]
    return found, (trainer.deepspeed.get_batch_info(), trainer.deepspeed.global_steps == trainer.state.max_steps)


def test_moments_that_are_lost_with_a_batch_size_are_told(tmp_path: Path) -> None:
    found, (batch, all_steps) = run_user_code(find_later, tmp_path, timeout=60)[0]
    assert len(found) == 1
    assert batch[1] == FITS
    assert all_steps


def find_inside(folder: Path, zero: dict[str, int]) -> tuple[int, int, int]:
    """One of four processes runs out of memory between collectives of groups that it is not in."""
    Hungry.where, Hungry.only_rank = "backward", 3
    more = {"auto_find_batch_size": True, "max_steps": 2, "trainer_class": Hungry}
    trainer = make_trainer(folder, config(3, zero=zero), per_device_train_batch_size=FITS + 1, **more)
    trainer.train()
    return trainer.deepspeed.get_batch_info()  # type: ignore[no-any-return]


@pytest.mark.skipif(torch.cuda.is_available(), reason="four gloo processes")
@pytest.mark.parametrize(
    "zero", [{"mics_shard_size": 2}, pytest.param({"zero_hpz_partition_size": 2}, marks=pytest.mark.slow)]
)
def test_out_of_memory_where_states_are_divided_inside(zero: dict[str, int], tmp_path: Path) -> None:
    batches = run_user_code(find_inside, tmp_path, zero, world_size=4, timeout=60)
    assert batches == [(FITS * 4, FITS, 1)] * 4


def never(folder: Path) -> str:
    Hungry.where, Hungry.only_rank = "forward", None
    trainer = make_trainer(folder, config(2), per_device_train_batch_size=4, trainer_class=Hungry)
    try:
        trainer.train()
    except RuntimeError as error:
        return str(error)
    return "trained"


@pytest.mark.slow
def test_out_of_memory_is_an_error_where_nobody_asked(tmp_path: Path) -> None:
    messages = run_user_code(never, tmp_path)
    assert all("allocate" in message for message in messages)
