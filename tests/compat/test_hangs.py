"""Ranks of a Trainer that go different ways: the run ends with a name for it and does not hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.compat.common import AUTO_BATCH, WORLD, run_user_code
from tests.helpers.distributed import DistributedFailure

CONFIG = {
    **AUTO_BATCH,
    "zero_optimization": {"stage": 3},
    "ds_hf": {"hang_timeout": 4.0},
}
two_processes = pytest.mark.skipif(WORLD < 2, reason="needs two devices: one process cannot diverge")


class LooksAtALossOnRankZero(TrainerCallback):
    """What many scripts do, and what is collective at stage 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step == 2:
            with torch.no_grad():
                model(input_ids=torch.ones(1, 8, dtype=torch.long, device=args.device))


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 128, (16, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def train_with_a_careless_callback(model: Path, output: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(output),
        deepspeed=CONFIG,
        per_device_train_batch_size=1,
        max_steps=6,
        report_to="none",
        average_tokens_across_devices=False,  # the Trainer's own gathers are not in the engine's log
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=arguments,
        train_dataset=rows(),
        callbacks=[LooksAtALossOnRankZero()],
    )
    trainer.train()


@pytest.mark.feature("Robustness", "ranks that diverge: an error with collective, module and stacks", pain="P28")
@two_processes
def test_forward_on_one_rank_has_a_name(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure) as failure:
        run_user_code(train_with_a_careless_callback, tiny_model, tmp_path, timeout=60)
    text = str(failure.value)
    assert "DivergenceError" in text
    assert "First difference: collective" in text
    # The forward of rank 0 alone met the next forward of rank 1, collective by collective: they part after it.
    assert "rank 0: all-gather of the weights of the model's root" in text
    assert "rank 1: all-gather of the weights of model.layers.0" in text, "the last layer was not released"
    assert "in compute_loss" in text, "where rank 0 is"
    assert text.count("in train_with_a_careless_callback") >= 2, "and rank 1"
